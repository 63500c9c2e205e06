"""Compaction: removes from the journal what no start of the run can need any more.

    changes of an adapter:   removed │ reduced: metrics, versions, progress │ whole, and their trajectories
                            cut - 1000                                    cut

The checkpoint that covers a change makes it unnecessary for recovery. Changes and trajectories that are newer than the
`cut` stay as they are, for late feedback and for people who look at them. What waits is never removed, and neither are
preferences, which reward models learn from whatever became of them. Of the answers that nobody has rewarded before they
were dropped, the newest stay, whether there are updates or not.

A compaction is a generator. Each step is one short transaction, so a crash leaves a whole journal, and other commits
wait for one step at most. Changes are reduced before their trajectories go: a change that is whole can be made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from mlx_parallm.core.requests import Signal
from mlx_parallm.rl.runs.store import LINEAGE_CHANGES, TRAJECTORY, JournalFile, Statements

_CHANGES_A_STEP, _ENTRIES_A_STEP = 50, 50
_REDUCED: Mapping[str, object] = {"groups": [], "teacher_logprobs": None, "reduced": True}
_PREFERENCES = f"{Signal.PREFERENCES.value}-"

_FIRST_CHANGE = "SELECT min(number) FROM changes WHERE adapter = ?"
_LAST_CHANGE = "SELECT max(number) FROM changes WHERE adapter = ?"
_FIRST_KEPT_AT = "SELECT min(at) FROM changes WHERE adapter = ? AND number > ?"
_UPDATES = (
    "SELECT number, body FROM changes WHERE adapter = ? AND kind = 'update' AND number > ? AND number <= ? "
    "ORDER BY number LIMIT ?"
)
_REMEMBERING = """SELECT body FROM changes WHERE adapter = ? AND number > ? AND body LIKE '%"remembered": true%'"""
_SET_BODY = "UPDATE changes SET body = ? WHERE adapter = ? AND number = ?"
_REMOVE_CHANGES = "DELETE FROM changes WHERE adapter = ? AND number <= ? AND number != ?"
_ENTRIES = (
    "SELECT i.number, i.adapter, i.kind, i.group_id, i.trajectory_id, e.at FROM "
    "(SELECT * FROM intake WHERE number > ? ORDER BY number LIMIT ?) i LEFT JOIN ends e USING (trajectory_id) "
    "ORDER BY i.number"
)
_REMOVE_ENTRIES = (
    "DELETE FROM intake WHERE adapter = ?1 AND group_id = ?2 AND trajectory_id IS NULL AND NOT EXISTS (SELECT 1 FROM "
    f"intake t WHERE t.adapter = ?1 AND t.group_id = ?2 AND t.kind = '{TRAJECTORY}' AND t.number < intake.number)"
)
"""Removes the entries of a group that are older than all trajectories that it still has."""
_UNREWARDED = (
    f"FROM intake i JOIN ends e USING (trajectory_id) WHERE i.kind = '{TRAJECTORY}' AND e.state = 'dropped' "
    f"AND i.group_id NOT GLOB '{_PREFERENCES}*' AND NOT EXISTS "
    f"(SELECT 1 FROM intake r WHERE r.trajectory_id = i.trajectory_id AND r.kind != '{TRAJECTORY}')"
)
_COUNT_UNREWARDED = f"SELECT count(*) {_UNREWARDED}"
_OLDEST_UNREWARDED = f"SELECT i.adapter, i.group_id, i.trajectory_id {_UNREWARDED} ORDER BY i.number LIMIT ?"


def compaction(
    file: JournalFile, adapter: str, covered: int, keep: int, needed: Collection[str] = ()
) -> Iterator[None]:
    """Removes what a start does not need. In the thread that writes the file.

    Args:
        covered: number of the last change that every checkpoint has from which training may resume.
        keep: changes that stay whole even if they are covered.
        needed: ids of trajectories that a later update may learn from again.

    Raises:
        StorageError: the disk failed. What has been removed by then is gone, and the rest is as it was.
        ConfigError: the file is damaged.
    """
    ((last,),) = file.rows(_LAST_CHANGE, adapter) or [(None,)]
    cut = min(covered, (last or 0) - keep)
    if cut <= 0 or not file.has_all_progress(adapter):  # an old version's updates have a part of the progress each
        return
    yield from _reduce_changes(file, adapter, cut)
    yield from _remove_trajectories(file, adapter, cut, needed)


def removal_of_unrewarded(file: JournalFile, keep: int) -> Iterator[None]:
    """Removes dropped answers, of all adapters, for which nothing has come, but for the newest `keep`, because feedback
    for them may still come. In the thread that writes the file.

    Raises:
        StorageError, ConfigError: see `compaction`.
    """
    ((count,),) = file.rows(_COUNT_UNREWARDED) or [(0,)]
    for left in range(count - keep, 0, -_ENTRIES_A_STEP):
        oldest = file.rows(_OLDEST_UNREWARDED, min(left, _ENTRIES_A_STEP))
        for adapter in {adapter for adapter, _, _ in oldest}:
            file.remove(_removal(adapter, [(group_id, one) for of, group_id, one in oldest if of == adapter]))
        yield


def _reduce_changes(file: JournalFile, adapter: str, cut: int) -> Iterator[None]:
    """Removes the oldest changes, and from the others up to `cut` what only making them again needs."""
    published = file.newest_version_change(adapter)  # it stays, because it says which versions there were
    ((first,),) = file.rows(_FIRST_CHANGE, adapter)
    for number in range(first, cut - LINEAGE_CHANGES, _CHANGES_A_STEP):
        last = min(number + _CHANGES_A_STEP, cut - LINEAGE_CHANGES)
        file.remove([(_REMOVE_CHANGES, [(adapter, last, published)])])
        yield
    number = 0
    while rows := file.rows(_UPDATES, adapter, number, cut, _CHANGES_A_STEP):
        bodies = [(number, json.loads(body)) for number, body in rows]
        whole = [(number, body) for number, body in bodies if not body.get("reduced")]
        reduced = [(json.dumps(body | _REDUCED, ensure_ascii=False), adapter, number) for number, body in whole]
        if reduced:
            file.commit([(_SET_BODY, reduced)])
        number = rows[-1][0]
        yield


def _remove_trajectories(file: JournalFile, adapter: str, cut: int, needed: Collection[str]) -> Iterator[None]:
    """Removes the trajectories that ended before the first change after `cut`, and what came for them. Those of the
    updates after it have ended with them, but for answers that an update has learnt from again."""
    ((first_kept_at,),) = file.rows(_FIRST_KEPT_AT, adapter, cut)
    kept_since = math.inf if first_kept_at is None else first_kept_at
    kept = {*needed, *_learnt_again(file, adapter, cut)}
    number = 0
    while rows := file.rows(_ENTRIES, number, _ENTRIES_A_STEP):
        ended = [
            (group_id, one)
            for _, trained, kind, group_id, one, at in rows
            if (trained, kind) == (adapter, TRAJECTORY) and at is not None and at < kept_since
            if one not in kept and not group_id.startswith(_PREFERENCES)
        ]
        if ended:
            file.remove(_removal(adapter, ended))
        number = rows[-1][0]
        yield


def _removal(adapter: str, ended: Sequence[tuple[str, str]]) -> Statements:
    ids = [(one,) for _, one in ended]
    groups = [(adapter, group_id) for group_id in {group_id for group_id, _ in ended}]
    of_trajectories = [f"DELETE FROM {table} WHERE trajectory_id = ?" for table in ("intake", "ends")]
    return [*((statement, ids) for statement in of_trajectories), (_REMOVE_ENTRIES, groups)]


def _learnt_again(file: JournalFile, adapter: str, cut: int) -> Iterator[str]:
    """The ids of trajectories that an update after `cut` has learnt from although they had ended before."""
    for (body,) in file.rows(_REMEMBERING, adapter, cut):
        remembered = (group for group in json.loads(body)["groups"] if group.get("remembered"))
        yield from (one for group in remembered for episode in group["episodes"] for one in episode["trajectory_ids"])
