"""GroupReader: shows the groups of the trajectory buffer to people. It changes nothing."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import ANSWER, NOT_SENT, Figure, sent_as
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import UnknownTrajectoryError, shown
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.objectives import token_advantages
from mlx_parallm.rl.recording import LATE, NOT_COUNTED
from mlx_parallm.rl.trajectories import ABOUT, GroupMember, TrajectoryGroup, TrajectoryState


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups are wanted. None lets all groups pass.

    Attributes:
        adapter: name of the adapter that they train.
        version: a version that sampled some of their answers, such as `math@3`.
        fate: see `GroupRow`.
        least_reward, most_reward: bounds of the mean reward. A group without a reward is outside of any bounds.
    """

    adapter: str | None = None
    version: str | None = None
    fate: TrajectoryState | None = None
    least_reward: float | None = None
    most_reward: float | None = None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group as a row of a list."""

    __pydantic_config__ = ANSWER

    number: int
    """Grows from one group to the next that comes, until the server is started again."""
    group_id: str
    """Its id."""
    adapter: str
    """The adapter that it trains."""
    versions: Sequence[AdapterText] = field(metadata=sent_as("lora_versions"))
    """The versions that sampled its answers; empty if they are unknown."""
    samples: int
    """Number of its answers, or of its episodes."""
    reward: Figure | None
    """Mean reward of the samples that have one; null if none has, and of edits."""
    fate: TrajectoryState
    """`waiting` for a reward; `scored`, waiting for an update; in an update now (`training`); `trained`; or `dropped`.
    If its samples differ and no update can take it now, the first that occurs of `training`, `waiting`, `scored`,
    `trained` and `dropped`."""
    reason: str
    """Why it was dropped; empty if it was not. If its samples have several reasons, the most frequent one."""
    signal: Signal
    """What it teaches: its rewards, or what people said."""
    first: Trajectory = field(metadata=NOT_SENT)
    """Its first trajectory."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A part of a list of groups, newest first. `more`: whether older ones follow that are wanted, too."""

    rows: Sequence[GroupRow]
    more: bool


class Thumbs(StrEnum):
    """What a thumb on a sample does now.

    COUNT: it is a reward. COUNT_LATE: the sample was dropped, and is learnt from as late feedback. NOTHING: it is
    refused, because the sample was trained on, its update was refused, or it is an edit.
    """

    COUNT = "count"
    COUNT_LATE = "count_late"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class EditedAnswer:
    """What a person wrote in place of an answer."""

    __pydantic_config__ = ANSWER

    text: str
    """The better answer."""
    signal: Signal
    """`corrections` are imitated; `preferences` are compared with the answer."""
    fate: TrajectoryState
    """What became of it; as that of a group."""
    reason: str
    """Why it was dropped; empty if it was not."""


@dataclass(frozen=True, slots=True)
class CollectedTurn:
    """One answer, and what is known about it.

    Attributes:
        advantages: one for each token of its completion; empty: no update has computed them.
        up, down: the number of people whose last opinion is for it, and against it.
    """

    trajectory: Trajectory
    advantages: Sequence[float]
    up: int
    down: int
    edits: Sequence[EditedAnswer]


@dataclass(frozen=True, slots=True)
class CollectedSample:
    """One answer of a group, or one episode with its turns in order. `advantage`: of the sample as a whole; None: no
    update has computed it. `fate` and `reason` are as in `GroupRow`."""

    turns: Sequence[CollectedTurn]
    reward: float | None
    advantage: float | None
    fate: TrajectoryState
    reason: str
    thumbs: Thumbs


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """One group in full. `scorer`: the scoring function that its requests named; None: there is none."""

    row: GroupRow
    scorer: str | None
    samples: Sequence[CollectedSample]


_FATES = (
    TrajectoryState.TRAINING,
    TrajectoryState.WAITING,
    TrajectoryState.SCORED,
    TrajectoryState.TRAINED,
    TrajectoryState.DROPPED,
)
"""A group that is not complete has the first of these fates that some of its samples have."""

_GROUPS_AT_A_TIME = 200
"""Groups that are looked at, some milliseconds, before the event loop gets its turn."""

_PAUSE_S = 0.001
"""Time that others get then. With none, a thread that writes an answer would wait for the interpreter lock."""


class GroupReader:
    """Shows what was collected: what waits for an update, and about as much of what was trained on or dropped since the
    process started. In a group of several keys, each reader sees its own samples. Event loop's thread only."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        self._buffer = buffer

    # -- the list --------------------------------------------------------------------------------

    async def page(self, wanted: GroupFilter, after: int | None, limit: int, reader: Reader) -> GroupPage:
        """The newest `limit` groups that are wanted, of those that are older than the group with the number `after`;
        None: of all."""
        numbers = [*self._buffer.known]
        older = numbers if after is None else numbers[: bisect_left(numbers, after)]
        rows: list[GroupRow] = []
        for looked_at, number in enumerate(reversed(older), 1):
            if looked_at % _GROUPS_AT_A_TIME == 0:
                await asyncio.sleep(_PAUSE_S)
            group = self._buffer.known.get(number)  # it may have been forgotten meanwhile
            row = None if group is None or wanted.adapter not in (None, group.adapter) else _row(group, reader)
            if row is None or not _passes(row, wanted):
                continue
            if len(rows) == limit:
                return GroupPage(rows, more=True)
            rows.append(row)
        return GroupPage(rows, more=False)

    # -- one group -------------------------------------------------------------------------------

    def group(self, name: str, most: int, reader: Reader) -> CollectedGroup:
        """The group with this id, or the one that has the trajectory with this id, with its first `most` samples.

        Raises:
            UnknownTrajectoryError: there is none, it is forgotten, or the reader may not see it.
        """
        rows = ((group, _row(group, reader)) for group in self._buffer.called(name))
        group, row = next(((group, row) for group, row in rows if row is not None), (None, None))
        if group is None or row is None:
            raise UnknownTrajectoryError(f"No group and no trajectory has the id {shown(name)}, or it is forgotten.")
        members = _visible(group, reader)[:most]
        edits = self._edits_of(members, reader)
        advantages = _advantages(group, members)
        samples = [self._sample(group, member, advantages.get(id(member), ()), edits) for member in members]
        return CollectedGroup(row, group.scorer, samples)

    def _edits_of(self, members: Sequence[GroupMember], reader: Reader) -> Mapping[str, list[EditedAnswer]]:
        """The edits of these answers that the reader may see, by the id of the answer, oldest first."""
        found: dict[str, list[EditedAnswer]] = {turn.trajectory_id: [] for member in members for turn in member.turns}
        for group in (group for group in self._buffer.known.values() if group.signal.is_edit):
            chosen = group.members[0]
            about = chosen.trajectory.collection.metadata.get(ABOUT)
            if about in found and reader.may_read(chosen.trajectory.owner):
                reason = chosen.reason or ""
                found[about].append(EditedAnswer(chosen.trajectory.text, group.signal, chosen.state, reason))
        return found

    def _sample(
        self,
        group: TrajectoryGroup,
        member: GroupMember,
        advantages: Sequence[Sequence[float]],
        edits: Mapping[str, list[EditedAnswer]],
    ) -> CollectedSample:
        of_turns = advantages or [()] * len(member.turns)
        turns = [
            self._turn(member, turn, values, edits[turn.trajectory_id])
            for turn, values in zip(member.turns, of_turns, strict=True)
        ]
        reward = None if group.signal.is_edit else member.reward
        advantage = member.advantage if advantages else None
        return CollectedSample(turns, reward, advantage, member.state, member.reason or "", self._thumbs(group, member))

    def _turn(
        self, member: GroupMember, turn: Trajectory, advantages: Sequence[float], edits: Sequence[EditedAnswer]
    ) -> CollectedTurn:
        copy = self._late_copy(turn)
        said, about = (member, turn.trajectory_id) if copy is None else (copy, LATE + turn.trajectory_id)
        opinions = said.opinions.get(about, {})
        up = sum(score > 0 for score in opinions.values())
        return CollectedTurn(turn, advantages, up, len(opinions) - up, edits)

    def _late_copy(self, turn: Trajectory) -> GroupMember | None:
        """The copy of a dropped answer that has late feedback; None: there is none, or it is forgotten."""
        known = self._buffer.member(LATE + turn.trajectory_id)
        return None if known is None else known[1]

    def _thumbs(self, group: TrajectoryGroup, member: GroupMember) -> Thumbs:
        if group.signal.is_edit:
            return Thumbs.NOTHING
        if member.is_open:
            return Thumbs.COUNT
        if member.reason is None or member.reason in NOT_COUNTED or group.signal is Signal.LATE_FEEDBACK:
            return Thumbs.NOTHING
        copies = [copy for turn in member.turns if (copy := self._late_copy(turn)) is not None]
        return Thumbs.COUNT_LATE if all(copy.is_open for copy in copies) else Thumbs.NOTHING


def _visible(group: TrajectoryGroup, reader: Reader) -> Sequence[GroupMember]:
    """The members all of whose turns the reader may see."""
    if not reader.sees(group.adapter):
        return ()
    return [member for member in group.members if all(reader.may_read(turn.owner) for turn in member.turns)]


def _row(group: TrajectoryGroup, reader: Reader) -> GroupRow | None:
    """The group as the reader may see it; None: not at all."""
    members = _visible(group, reader)
    if not members:
        return None
    rewards = [reward for member in members if (reward := member.reward) is not None]
    states = {member.state for member in members}
    fate = TrajectoryState.SCORED if group.complete else next(state for state in _FATES if state in states)
    dropped = fate is TrajectoryState.DROPPED
    reasons = Counter(member.reason for member in members if dropped and member.reason)
    versions = dict.fromkeys(turn.adapter for member in members for turn in member.turns if turn.adapter is not None)
    return GroupRow(
        group.number,
        group.group_id,
        group.adapter,
        tuple(versions),
        len(members),
        fsum(rewards) / len(rewards) if rewards and not group.signal.is_edit else None,
        fate,
        reasons.most_common(1)[0][0] if reasons else "",
        group.signal,
        members[0].turns[0],
    )


def _passes(row: GroupRow, wanted: GroupFilter) -> bool:
    if wanted.fate not in (None, row.fate):
        return False
    if wanted.version is not None and wanted.version not in map(str, row.versions):
        return False
    if wanted.least_reward is None and wanted.most_reward is None:
        return True
    return row.reward is not None and (
        (wanted.least_reward is None or row.reward >= wanted.least_reward)
        and (wanted.most_reward is None or row.reward <= wanted.most_reward)
    )


def _advantages(group: TrajectoryGroup, members: Sequence[GroupMember]) -> Mapping[int, Sequence[Sequence[float]]]:
    """The advantages of those of `members` that an update took, by `id` of the member: [turn][token]."""
    taken = [member for member in group.members if member.advantage is not None and not member.is_open]
    if not any(member.token_rewards for member in taken):  # then each member's advantages are its own matter
        taken = [member for member in members if member.advantage is not None and not member.is_open]
    values = [member.advantage or 0.0 for member in taken]
    computed = token_advantages(taken, values, group.divisor)
    return {id(member): of_turns for member, of_turns in zip(taken, computed, strict=True)}
