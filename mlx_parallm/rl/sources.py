"""Where the signal of a trajectory comes from, and SourceLedger, which counts what was learnt from each source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import Literal

from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.rl.trajectories import GroupMember, TrajectoryGroup, TrajectoryState

SCORERS, ENVIRONMENTS, FEEDBACK, UNRATED = "scorers", "environments", "feedback", "unrated"
"""Sources of rewards. The other sources are the other signals. UNRATED: the answer waits, or waited, for feedback."""

_MAX_PEOPLE = 100_000
"""Users that are remembered, to count different ones."""


def source_of(group: TrajectoryGroup, member: GroupMember) -> str:
    if group.signal is not Signal.REWARDS:
        return group.signal.value
    if member.from_feedback:
        return FEEDBACK
    if group.was_given or (group.scorer is None and member.reward is not None):
        return ENVIRONMENTS
    return UNRATED if group.scorer is None else SCORERS


def sources_of(groups: Iterable[TrajectoryGroup]) -> Counter[str]:
    """The members that an update has taken, by source."""
    return Counter(source_of(group, one) for group in groups for one in group.in_state(TrajectoryState.TRAINING))


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What was learnt from one source."""

    __pydantic_config__ = ANSWER

    source: str
    """`scorers`; `environments`, which reward what they sample; `feedback` in time; `late_feedback`; `preferences`;
    `corrections`; or `unrated`: answers that wait, or waited, for feedback."""
    arrived: int = 0
    """Answers, episodes or edits that came. A preference counts as two answers."""
    waiting: int = 0
    """Those that wait for a reward or an update."""
    trained: int = 0
    """Those that were trained on."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Those that were not, by reason."""
    updates: int = 0
    """Updates that trained on some of them."""
    gradient_share: float = 0.0
    """Its part of the gradient norms of all these updates, 0 to 1. In an update of several sources, each counts by the
    number of its answers."""
    reward_change: float | None = None
    """The changes of the mean reward after its updates, summed. If several sources had updates between two
    measurements, each gets a part by its number of answers. null: none was measured."""
    evaluation_change: float | None = None
    """The same of the evaluations."""


Whose = Literal["key", "server", "others", "unknown"]


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What was learnt from the data of one API key, or of several."""

    __pydantic_config__ = ANSWER

    whose: Whose
    """`key`: it is named. `server`: answers that the server has sampled for tasks of its own. `others`: all other keys
    together, and what is of no known key. `unknown`: what is of no known key."""
    key: str | None
    """The name of the key."""
    steps: float
    """How far it has moved the adapter, in whole steps."""
    share: float
    """Its part of all that the adapter has learnt, 0 to 1."""


@dataclass(slots=True)
class _Attribution:
    """Ascribes the changes of a figure to the sources of the updates between two measurements."""

    changes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: float | None = None
    since: Counter[str] = field(default_factory=Counter)

    def learnt(self, sources: Mapping[str, int]) -> None:
        self.since.update(sources)

    def measured(self, value: float) -> None:
        total = self.since.total()
        if self.last is not None and total:
            for source, members in self.since.items():
                self.changes[source] += (value - self.last) * members / total
        self.last = value
        self.since.clear()


@dataclass(slots=True)
class _Learnt:
    """What one adapter has learnt since the process started."""

    trained: Counter[str] = field(default_factory=Counter)
    dropped: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    updates: Counter[str] = field(default_factory=Counter)
    gradients: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: defaultdict[str | None, float] = field(default_factory=lambda: defaultdict(float))
    rewards: _Attribution = field(default_factory=_Attribution)
    evaluations: _Attribution = field(default_factory=_Attribution)
    opinions: int = 0
    people: set[str] = field(default_factory=set)


class SourceLedger:
    """Counts answers, episodes and edits by source, and what the updates that learnt from them have changed. It starts
    empty with the process. Event loop's thread only."""

    def __init__(self) -> None:
        self._of: defaultdict[str, _Learnt] = defaultdict(_Learnt)

    def opinion(self, adapter: str, user: str) -> None:
        """Counts a score that was taken."""
        self._of[adapter].opinions += 1
        self.person(adapter, user)

    def person(self, adapter: str, user: str) -> None:
        people = self._of[adapter].people
        if user and len(people) < _MAX_PEOPLE:
            people.add(user)

    def ended(self, group: TrajectoryGroup) -> None:
        """Counts the members of a group that has left the buffer."""
        learnt = self._of[group.adapter]
        for member in group.members:
            source = source_of(group, member)
            if member.state is TrajectoryState.TRAINED:
                learnt.trained[source] += 1
            else:
                learnt.dropped[source][member.reason or ""] += 1

    def updated(self, adapter: str, sources: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """An update on so many members of each source has changed the policy."""
        learnt, total = self._of[adapter], sum(sources.values())
        if (reward := metrics.get("reward_mean")) is not None:
            learnt.rewards.measured(reward)  # of answers that were sampled before this update
        for source, members in sources.items():
            learnt.updates[source] += 1
            learnt.gradients[source] += metrics.get("grad_norm", 0.0) * members / total
        learnt.rewards.learnt(sources)
        learnt.evaluations.learnt(sources)

    def learnt(self, adapter: str, shares: Mapping[str | None, float], metrics: Mapping[str, float]) -> None:
        """An update has changed the policy. `shares`: the parts that the owners have had in it; see `rl.shares`."""
        total = fsum(shares.values())
        for owner, share in shares.items():
            if share:
                self._of[adapter].steps[owner] += metrics.get("step_scale", 1.0) * share / total

    def forget_key(self, adapter: str, key: str) -> None:
        """The adapter has nothing any more of what it had learnt from a key."""
        self._of[adapter].steps.pop(key, None)

    def evaluated(self, adapter: str, mean: float) -> None:
        self._of[adapter].evaluations.measured(mean)

    def people(self, adapter: str) -> tuple[int, int]:
        """The scores that were taken, and the different users."""
        learnt = self._of[adapter]
        return learnt.opinions, len(learnt.people)

    def keys(self, adapter: str, reader: Reader) -> tuple[KeyReport, ...]:
        """What was learnt from each owner, most first. Those whose data the reader may not read are one entry."""
        steps = self._of[adapter].steps
        total = fsum(steps.values())
        shown = sorted((each for each in steps if reader.may_read(each)), key=lambda each: -steps[each])
        entries: list[tuple[Whose, str | None, float]] = [(*_whose(each), steps[each]) for each in shown]
        if hidden := [value for owner, value in steps.items() if not reader.may_read(owner)]:
            entries.append(("others", None, fsum(hidden)))
        return tuple(KeyReport(whose, key, value, value / total if total else 0.0) for whose, key, value in entries)

    def report(self, adapter: str, waiting: Iterable[TrajectoryGroup]) -> tuple[SourceReport, ...]:
        """One entry for each source of which something came. `waiting`: the adapter's groups in the buffer."""
        learnt = self._of[adapter]
        open_ones = Counter(source_of(group, member) for group in waiting for member in group.members)
        total = sum(learnt.gradients.values())
        names = sorted({*open_ones, *learnt.trained, *learnt.dropped})
        return tuple(
            SourceReport(
                source=name,
                arrived=open_ones[name] + learnt.trained[name] + learnt.dropped[name].total(),
                waiting=open_ones[name],
                trained=learnt.trained[name],
                dropped=dict(learnt.dropped[name]),
                updates=learnt.updates[name],
                gradient_share=learnt.gradients[name] / total if total else 0.0,
                reward_change=learnt.rewards.changes.get(name),
                evaluation_change=learnt.evaluations.changes.get(name),
            )
            for name in names
        )


def _whose(owner: str | None) -> tuple[Whose, str | None]:
    """What `KeyReport` says of an owner; see `Trajectory.owner`."""
    if owner is None:
        return "unknown", None
    return ("key", owner) if owner else ("server", None)
