"""What is to be forgotten: the trajectories of a key, some trajectories, or those of a time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Any

from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.recording import LATE
from mlx_parallm.rl.runs.records import PolicyChange, TrainedEpisode, TrainedGroup, Update, body_to_json
from mlx_parallm.rl.runs.store import TRAJECTORY, JournalFile, Statements
from mlx_parallm.rl.trajectories import ABOUT

_Place = tuple[str, str, str, str]
"""Where a trajectory belongs: adapter, owner, group and episode. Keys may have groups and episodes of the same ids."""


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
    """What of one adapter is to be forgotten. `ids`: of trajectories that were collected; of an episode, all turns.
    `entries`: numbers of the journal's entries that came for groups and episodes of which nothing else is left."""

    spec: ForgetSpec
    ids: frozenset[str]
    entries: frozenset[int] = frozenset()

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

_ROWS_A_TIME, _REMOVED_A_TIME = 500, 100
_ROWS = (
    "SELECT number, adapter, group_id, trajectory_id, kind, body FROM intake WHERE number > ? ORDER BY number LIMIT ?"
)
_OF_ONE, _OF_SEVERAL = ("feedback", "token_rewards"), ("episode_reward", "closed")
"""Kinds of entries that name a trajectory, and those for a group or an episode of an owner."""


@dataclass(slots=True)
class _Index:
    """What the journal says of trajectories without their tokens. `episodes`: the turns of each. `about`: the edits and
    preferences of an answer. `chosen`: those that are to be forgotten by themselves. `entries`: for groups, whose
    episode is empty, and for episodes; those of older versions name no owner."""

    places: dict[str, _Place] = field(default_factory=dict)
    episodes: defaultdict[_Place, list[str]] = field(default_factory=lambda: defaultdict(list))
    about: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    chosen: set[str] = field(default_factory=set)
    entries: list[tuple[int, tuple[str, str | None, str, str]]] = field(default_factory=list)

    def related(self, one: str) -> Iterator[str]:
        """Trajectories that have text of this one: turns of its episode, edits, and a copy for late feedback."""
        yield from self.episodes.get(self.places.get(one, ("", "", "", "")), ())
        yield from self.about.get(one, ())
        yield from (copy for copy in [f"{LATE}{one}"] if copy in self.places)

    def left_over(self, found: Collection[str]) -> Iterator[tuple[str, int]]:
        """The adapters and the numbers of entries for which no other trajectory is left than those that are found."""
        left: set[tuple[str, str | None, str, str]] = {at for one, at in self.places.items() if one not in found}
        left |= {(adapter, some, group, "") for adapter, owner, group, _ in left for some in (owner, None)}
        yield from ((place[0], number) for number, place in self.entries if place not in left)


def find(
    file: JournalFile, spec: ForgetSpec, known: Mapping[str, Forgotten] = MappingProxyType({})
) -> dict[str, Forgotten]:
    """What of each adapter is to be forgotten, by the adapter's name. Of an episode all turns are, since each has the
    text of those before it; and so are copies, edits and preferences of a trajectory. Blocks on the disk, for some
    seconds if the journal is large.

    Args:
        known: what was found before, which the journal may not have any more.
    """
    index, found = _indexed(file, spec), {name: set(each.ids) for name, each in known.items()}
    new = [*index.chosen, *(one for ids in found.values() for one in ids)]
    seen = set(new)
    while new:
        one = new.pop()
        if one in index.places:
            found.setdefault(index.places[one][0], set()).add(one)
        related = {each for each in index.related(one) if each not in seen}
        seen |= related
        new += related
    entries = defaultdict[str, set[int]](set)
    for adapter, number in index.left_over(seen):
        entries[adapter].add(number)
    adapters = sorted({*found, *_with_given(file, spec)})
    return {name: Forgotten(spec, frozenset(found.get(name, ())), frozenset(entries[name])) for name in adapters}


def _indexed(file: JournalFile, spec: ForgetSpec) -> _Index:
    index, judged, number = _Index(), set[str](), 0
    while rows := file.rows(_ROWS, number, _ROWS_A_TIME):
        for at, adapter, group_id, one, kind, text in rows:
            if kind == TRAJECTORY:
                _add(index, spec, adapter, group_id, one, json.loads(text))
            elif kind in _OF_SEVERAL:
                _add_entry(index, at, (adapter, group_id), json.loads(text))
            elif kind in _OF_ONE and spec.key is not None and json.loads(text).get("key") == spec.key:
                judged.add(one)
        number = rows[-1][0]
    index.chosen |= judged & index.places.keys()
    return index


def _add(index: _Index, spec: ForgetSpec, adapter: str, group_id: str, one: str, body: Mapping[str, Any]) -> None:
    collection, (since, until) = body["collection"], spec.span
    place = index.places[one] = (adapter, body.get("owner") or "", group_id, collection.get("episode_id") or "")
    if place[3]:
        index.episodes[place].append(one)
    if isinstance(about := collection.get("metadata", {}).get(ABOUT), str):
        index.about[about].append(one)
    if spec.key is not None:
        chosen = body.get("owner") == spec.key and body["created"] < until
    else:
        chosen = one in spec.trajectory_ids if spec.trajectory_ids else since <= body["created"] < until
    if chosen:
        index.chosen.add(one)


def _add_entry(index: _Index, number: int, of: tuple[str, str], entry: Mapping[str, Any]) -> None:
    owner = entry.get("key")
    index.entries.append((number, (of[0], owner, of[1], "" if owner is None else entry.get("episode_id", ""))))


_REMOVE = ("DELETE FROM intake WHERE trajectory_id = ?", "DELETE FROM ends WHERE trajectory_id = ?")
_REMOVE_ENTRY = f"DELETE FROM intake WHERE number = ? AND kind IN {_OF_SEVERAL}"
_SET_BODY = "UPDATE changes SET body = ? WHERE adapter = ? AND number = ?"


def edits(adapter: str, edited: Mapping[int, Update]) -> Statements:
    """Writes the new records of updates, by number."""
    return [(_SET_BODY, [(body_to_json(body)[1], adapter, number) for number, body in edited.items()])]


def removal(forgotten: Forgotten) -> Iterator[Statements]:
    """Removes what the journal has of what is forgotten, and what came for it; a little at a time, so that commits of
    clients come between."""
    ids, entries = ([(one,) for one in sorted(some)] for some in (forgotten.ids, forgotten.entries))
    for start in range(0, len(ids), _REMOVED_A_TIME):
        yield [(statement, ids[start : start + _REMOVED_A_TIME]) for statement in _REMOVE]
    for start in range(0, len(entries), _REMOVED_A_TIME):
        yield [(_REMOVE_ENTRY, entries[start : start + _REMOVED_A_TIME])]


def _with_given(file: JournalFile, spec: ForgetSpec) -> list[str]:
    """The adapters whose updates have learnt from what was given with them and is to be forgotten."""
    given, adapters = Forgotten(spec, frozenset()), file.rows("SELECT DISTINCT adapter FROM changes")
    return [name for (name,) in adapters if any(given.has(change) for change in file.changes(name))]
