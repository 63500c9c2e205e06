"""What is to be forgotten: the trajectories of a key, some trajectories, or those of a time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.recording import LATE
from mlx_parallm.rl.runs.records import PolicyChange, TrainedEpisode, TrainedGroup, Update, body_to_json
from mlx_parallm.rl.runs.store import TRAJECTORY, JournalFile, Statements
from mlx_parallm.rl.trajectories import ABOUT

_EpisodeKey = tuple[str, str, str]
"""Adapter, group and episode."""


@dataclass(frozen=True, slots=True)
class ForgetSpec:
    """What to forget: one of `key`, `trajectory_ids`, and a span of time.

    Attributes:
        key: the name of an API key. Trajectories are its own if it has asked for them, or has judged them.
        since, until: Unix time at which a trajectory was sampled or given; None: the beginning, and `asked_at`.
        from_scratch: also what later versions have sampled, because they had learnt from what is forgotten.
        asked_at: Unix time. What comes later is not forgotten.

    Raises:
        InvalidRequestError: it is not one of these.
    """

    key: str | None = None
    trajectory_ids: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    from_scratch: bool = False
    asked_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        by_time = self.since is not None or self.until is not None
        if (self.key is not None) + bool(self.trajectory_ids) + by_time != 1:
            raise InvalidRequestError("Name what to forget: a key, trajectory_ids, or a time (since, until).")

    @property
    def span(self) -> tuple[float, float]:
        """The time within which trajectories are forgotten, [from, to)."""
        return self.since or 0.0, min(self.asked_at, self.asked_at if self.until is None else self.until)

    def __str__(self) -> str:
        if self.key is not None:
            return f"the key {self.key}"
        if self.trajectory_ids:
            return f"{len(self.trajectory_ids)} trajectories"
        return "a time"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What of one adapter is to be forgotten. `ids`: of trajectories that were collected; of an episode, all turns."""

    spec: ForgetSpec
    ids: frozenset[str]

    def has(self, change: PolicyChange) -> bool:
        """Whether an update has learnt from some of it."""
        body = change.body
        if not isinstance(body, Update):
            return False
        if body.reduced:
            return self._may_have(body, change.at)
        return any(self._has(episode, change.at) for group in body.groups for episode in group.episodes)

    def _may_have(self, body: Update, at: float) -> bool:
        """The same of an update that does not say any more what it has learnt from."""
        since, until = self.spec.span
        if self.spec.key is not None:
            return self.spec.key in (body.owners or ()) and at < until
        return not self.spec.trajectory_ids and since <= at < until

    def rest(self, change: PolicyChange, groups: Iterable[TrainedGroup]) -> list[TrainedGroup]:
        """The groups of an update without what is forgotten."""
        kept = (only(group, [not self._has(episode, change.at) for episode in group.episodes]) for group in groups)
        return [group for group in kept if group.episodes]

    def _has(self, episode: TrainedEpisode, at: float) -> bool:
        if not self.ids.isdisjoint(episode.trajectory_ids):
            return True
        return any(self._has_given(given, at) for given in episode.given)

    def _has_given(self, given: GivenTrajectory, at: float) -> bool:
        """Of a trajectory that was given with an update at this time, which has no id."""
        if at >= self.spec.asked_at:
            return False
        if self.spec.key is not None:
            return given.owner == self.spec.key
        since, until = self.spec.span
        return not self.spec.trajectory_ids and since <= at < until


def only(group: TrainedGroup, kept: Sequence[bool]) -> TrainedGroup:
    """A group with some of its episodes."""
    rewards = tuple(compress(group.rewards, kept)) if group.rewards else ()
    return replace(group, episodes=tuple(compress(group.episodes, kept)), rewards=rewards)


# -- in the journal --------------------------------------------------------------------------------

_ROWS_A_TIME = 500
_ROWS = (
    "SELECT number, adapter, group_id, trajectory_id, kind, body FROM intake WHERE number > ? ORDER BY number LIMIT ?"
)
_JUDGEMENTS = ("feedback", "token_rewards", "episode_reward")


@dataclass(slots=True)
class _Index:
    """What the journal says of trajectories without their tokens. `episodes`: the turns of each, by adapter, group and
    episode. `about`: the edits and preferences of an answer. `chosen`: those that are to be forgotten by themselves."""

    adapters: dict[str, str] = field(default_factory=dict)
    episode_of: dict[str, _EpisodeKey] = field(default_factory=dict)
    episodes: defaultdict[_EpisodeKey, list[str]] = field(default_factory=lambda: defaultdict(list))
    about: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    chosen: set[str] = field(default_factory=set)

    def related(self, one: str) -> Iterator[str]:
        """Trajectories that have text of this one: turns of its episode, edits, and a copy for late feedback."""
        yield from self.episodes.get(self.episode_of.get(one, ("", "", "")), ())
        yield from self.about.get(one, ())
        yield from (copy for copy in [f"{LATE}{one}"] if copy in self.adapters)


def find(file: JournalFile, spec: ForgetSpec) -> dict[str, Forgotten]:
    """What of each adapter is to be forgotten, by the adapter's name. Of an episode all turns are, since each has the
    text of those before it; and so are copies, edits and preferences of a trajectory. Blocks on the disk, for some
    seconds if the journal is large."""
    index, found = _indexed(file, spec), defaultdict[str, set[str]](set)
    new = [*index.chosen]
    while new:
        one = new.pop()
        if one not in found[index.adapters[one]]:
            found[index.adapters[one]].add(one)
            new += index.related(one)
    adapters = {*found, *_with_given(file, spec)}
    return {adapter: Forgotten(spec, frozenset(found[adapter])) for adapter in sorted(adapters)}


def _indexed(file: JournalFile, spec: ForgetSpec) -> _Index:
    index, judged, number = _Index(), list[tuple[str, str, Mapping[str, Any]]](), 0
    while rows := file.rows(_ROWS, number, _ROWS_A_TIME):
        for _, adapter, group_id, one, kind, text in rows:
            if kind == TRAJECTORY:
                _add(index, spec, adapter, group_id, one, json.loads(text))
            elif kind in _JUDGEMENTS and spec.key is not None:
                judged.append((adapter, group_id, json.loads(text)))
        number = rows[-1][0]
    for adapter, group_id, entry in judged:
        if entry.get("key") == spec.key:
            turns = index.episodes.get((adapter, group_id, entry.get("episode_id", "")), ())
            named = [one for one in (entry.get("trajectory_id"),) if one in index.adapters]
            index.chosen.update([*turns, *named])
    return index


def _add(index: _Index, spec: ForgetSpec, adapter: str, group_id: str, one: str, body: Mapping[str, Any]) -> None:
    collection, (since, until) = body["collection"], spec.span
    index.adapters[one] = adapter
    if episode_id := collection.get("episode_id"):
        index.episode_of[one] = (adapter, group_id, episode_id)
        index.episodes[adapter, group_id, episode_id].append(one)
    if isinstance(about := collection.get("metadata", {}).get(ABOUT), str):
        index.about[about].append(one)
    if spec.key is not None:
        chosen = body.get("owner") == spec.key and body["created"] < until
    else:
        chosen = one in spec.trajectory_ids if spec.trajectory_ids else since <= body["created"] < until
    if chosen:
        index.chosen.add(one)


_REMOVE = ("DELETE FROM intake WHERE trajectory_id = ?", "DELETE FROM ends WHERE trajectory_id = ?")
_REMOVE_JUDGEMENTS = "DELETE FROM intake WHERE adapter = ? AND kind = 'episode_reward' AND instr(body, ?)"
_REMOVE_ENTRIES = (
    "DELETE FROM intake WHERE adapter = ? AND trajectory_id IS NULL AND NOT EXISTS (SELECT 1 FROM intake t WHERE "
    f"t.kind = '{TRAJECTORY}' AND t.adapter = intake.adapter AND t.group_id = intake.group_id)"
)
_SET_BODY = "UPDATE changes SET body = ? WHERE adapter = ? AND number = ?"


def removal(adapter: str, forgotten: Forgotten, edited: Mapping[int, Update]) -> Statements:
    """Removes what the journal has of what is forgotten, and of groups of which nothing is left. `edited`: by number,
    the new records of updates."""
    ids = [(one,) for one in sorted(forgotten.ids)]
    bodies = [(body_to_json(body)[1], adapter, number) for number, body in edited.items()]
    key = json.dumps({"key": forgotten.spec.key}, ensure_ascii=False)[1:-1]
    judged = [(_REMOVE_JUDGEMENTS, [(adapter, key)])] if forgotten.spec.key is not None else []
    return [(_SET_BODY, bodies), *((each, ids) for each in _REMOVE), *judged, (_REMOVE_ENTRIES, [(adapter,)])]


def _with_given(file: JournalFile, spec: ForgetSpec) -> list[str]:
    """The adapters whose updates have learnt from what was given with them and is to be forgotten."""
    given, adapters = Forgotten(spec, frozenset()), file.rows("SELECT DISTINCT adapter FROM changes")
    return [name for (name,) in adapters if any(given.has(change) for change in file.changes(name))]
