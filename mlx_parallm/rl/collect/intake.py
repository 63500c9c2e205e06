"""Intake: how trajectories come into the buffer, and how they get their rewards. GroupScoring: asks the scoring
functions of complete groups for them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core import AdapterRef, CollectionSpec, Trajectory
from mlx_parallm.errors import ConflictError, InvalidRequestError, RequestError, shown
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.group_rewards import GroupRewards, check_finite, group_of_episode
from mlx_parallm.rl.collect.groups import DropReason, GroupKey, GroupMember, TrajectoryGroup, group_name
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Arrival, Closed, EpisodeReward, Feedback, GroupEntry, Score, TokenRewards
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.tasks import spawn

_log = logging.getLogger(__name__)


class GroupScoring:
    """Event loop's thread only. Its length is the number of groups that are being scored.

    Args:
        journal: gets the rewards.
        on_ready: called with a group that has its rewards, or was dropped without.
    """

    def __init__(
        self,
        rewards: GroupRewards,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        journal: Journal,
        on_ready: Callable[[TrajectoryGroup], None],
        emit: Emit,
    ) -> None:
        self._rewards, self._buffer, self._scorers = rewards, buffer, scorers
        self._journal, self._on_ready, self._emit = journal, on_ready, emit
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, group: TrajectoryGroup) -> None:
        """Begins to score a group to which no more members come."""
        task = spawn(self._score(group), _log, f"scoring {group.group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _score(self, group: TrajectoryGroup) -> None:
        if not group.waiting:  # after a restart, the journal had the rewards
            return
        try:
            rewards = await self._scorers.score([member.trajectory for member in group.members])
        except Exception as error:  # noqa: BLE001 - a failing scorer must affect only its own group
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)
        else:
            for member, reward in zip(group.members, rewards, strict=True):
                self._journal.noted(group.adapter, group.group_id, Score(member.trajectory.trajectory_id, reward))
            self._rewards.score(group, rewards)
            of_group = {**group.event_data, "complete": group.complete}
            self._emit("scored", **of_group, rewards=list(rewards))
        self._on_ready(group)


class TurnKind(StrEnum):
    """What a turn is to its episode. CONTINUED: its prompt continues the tokens of an earlier turn. APART: it does not,
    so it becomes a sample of its own."""

    FIRST = "first"
    CONTINUED = "continued"
    APART = "apart"


def kinds_of_turns(group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> list[TurnKind]:
    """What trajectories that came together are to their episodes; nothing for those that belong to none."""
    return [
        _kind_of_turn(member, turn, len(trajectories) > 1)
        for turn in trajectories
        if (member := group.episode(turn.collection.episode_id)) is not None
    ]


def _kind_of_turn(member: GroupMember, turn: Trajectory, came_with_others: bool) -> TurnKind:
    if len(member.turns) == 1 or (came_with_others and turn is member.turns[0]):
        return TurnKind.FIRST
    return TurnKind.CONTINUED if member.continues(turn) else TurnKind.APART


class Added(NamedTuple):
    """What became of the answers of one request. `dropped`: why they were dropped at once; None if they were not.
    `apart`: they do not continue an earlier turn of their episode."""

    dropped: DropReason | None
    apart: bool


class Intake:
    """Adds groups to the buffer and gets their rewards, from scorers and feedback. Event loop's thread only.

    Attributes:
        turns: turns of episodes by adapter name and kind.

    Args:
        on_ready: called with a group whenever it may have become complete, or other groups of its adapter may be taken.
        journal: gets the rewards of scorers. What clients send is in it before the methods here are called.
    """

    def __init__(
        self,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        config: RLTrainingConfig,
        on_ready: Callable[[TrajectoryGroup], None],
        emit: Emit,
        journal: Journal | None = None,
    ) -> None:
        self._buffer, self._scorers, self._config = buffer, scorers, config
        self._on_ready, self._emit = on_ready, emit
        self._journal = journal or Journal()
        self.turns: defaultdict[str, Counter[TurnKind]] = defaultdict(Counter)
        self._rewards = GroupRewards(buffer)
        self._scoring = GroupScoring(self._rewards, buffer, scorers, self._journal, on_ready, emit)

    @property
    def in_scoring(self) -> int:
        """Groups whose scoring functions are at work."""
        return len(self._scoring)

    def check(self, collection: CollectionSpec, adapter: str, owner: str = "") -> None:
        """Checks before generation that the group that a request of this API key names will take its answers.

        Raises:
            InvalidRequestError: the group has another size or scorer.
            ConflictError: the group is closed, or trains another adapter.
        """
        name = group_name(collection)
        group = self._buffer.find(name, owner) if name else None
        if (group is not None and group.closed) or (group is None and name and self._buffer.has_left(name, owner)):
            raise ConflictError(f"The group {shown(name)} is closed; use another group_id.", param="group_id")
        if group is None:
            return
        if group.adapter != adapter:
            raise ConflictError(f"The group {shown(name)} trains another adapter than {adapter}.", param="group_id")
        if collection.group_id and collection.group_size != group.size:
            raise InvalidRequestError(
                f"The group {shown(name)} was begun with group_size {group.size}; send the same.", param="group_size"
            )
        if collection.scorer != group.scorer:
            raise InvalidRequestError(
                f"The group {shown(name)} was begun with scoring_function {group.scorer}; send the same.",
                param="scoring_function",
            )

    def add(self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None) -> Added:
        """Adds the answers of one request to one prompt. `refused`: why they cannot be trained on; None if they can."""
        first = trajectories[0]
        key = (first.group_id, first.owner or "")
        group = self._buffer.find(*key)
        closed = group.closed or group.adapter != adapter if group else self._buffer.has_left(*key)
        refused = refused or (DropReason.CLOSED if closed and group_name(first.collection) else None)
        if refused is not None or group is None:
            group = self._begin(adapter, trajectories, refused)
        else:
            self._buffer.extend(group, trajectories)
        kinds = kinds_of_turns(group, trajectories)
        self.turns[adapter].update(kinds)
        self._emit(
            "collected",
            **{**group.event_data, "group_id": first.group_id},
            version=None if first.adapter is None else str(first.adapter),
            trajectories=len(trajectories),
        )
        if refused is not None:
            self._buffer.drop(group, refused)
        elif group.closed:
            self._await_rewards(group)
        else:
            self._close_if_full(group)
        dropped = None if self._buffer.holds(group) else group.members[-1].reason
        return Added(dropped, TurnKind.APART in kinds)

    def add_episodes(
        self,
        adapter: str,
        trajectories: Sequence[Trajectory],
        entries: Sequence[GroupEntry],
        refused: DropReason | None,
    ) -> Added:
        """Adds a group of episodes that have ended, and applies its rewards and its end, which the journal has."""
        added = self.add(adapter, trajectories, refused)
        if added.dropped is None:
            with self._unrecorded():
                for entry in entries:
                    self.apply(entry)
            if (group := self._buffer.find(trajectories[0].group_id, trajectories[0].owner or "")) is not None:
                rewards = [member.reward for member in group.members]
                self._emit("scored", **group.event_data, complete=group.complete, rewards=rewards)
        return added

    def give(self, adapter: str, trajectories: Sequence[Trajectory], entries: Sequence[Score | Feedback]) -> None:
        """Adds a group that came with its rewards."""
        group = TrajectoryGroup(adapter, trajectories)
        self._buffer.add(group)
        self._emit("collected", **group.event_data, version=None, trajectories=len(trajectories))
        for entry in entries:
            if isinstance(entry, Score):
                self._rewards.score_member(entry.trajectory_id, entry.reward)
            else:
                self._rewards.feedback(entry.trajectory_id, entry.score, entry.user)
        rewards = [member.reward for member in group.members]
        self._emit("scored", **group.event_data, complete=group.complete, rewards=rewards)
        self._on_ready(group)

    def _begin(self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None) -> TrajectoryGroup:
        """Adds a new group. Refused answers are a group of their own, because that of their id may go on."""
        group = TrajectoryGroup(adapter, trajectories)
        if refused is not None:
            group.group_id, group.closed = trajectories[0].trajectory_id, True
        self._buffer.add(group)
        if not group.closed and (timeout_s := self._config.feedback_timeout_s) is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, group.key)
        return group

    def _await_rewards(self, group: TrajectoryGroup) -> None:
        """Starts the scorer of a group to which no more members come, and the time limit for its rewards."""
        if not self._buffer.holds(group):
            return
        timeout_s = self._config.feedback_timeout_s if group.scorer is None else self._config.group_timeout_s
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, group.key)
        if group.scorer is not None:
            self._scoring.start(group)

    def restore(
        self,
        adapter: str,
        entries: Sequence[Arrival | GroupEntry],
        reason_against: Callable[[AdapterRef | None], DropReason | None],
    ) -> Sequence[Feedback]:
        """Does again, in order, what had been done before a restart for trajectories that wait. What does not apply any
        more, because a part of its group was trained on, is left out.

        Returns:
            The opinions that were left out.
        """
        left_out: list[Feedback] = []
        with self._unrecorded():
            for entry in entries:
                try:
                    if isinstance(entry, Arrival):
                        self.add(adapter, entry.trajectories, reason_against(entry.trajectories[0].adapter))
                    else:
                        self.apply(entry)
                except RequestError:
                    left_out += [entry] if isinstance(entry, Feedback) else []
        return left_out

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """In the block, what happens to groups is not written: the journal has it already."""
        journal, self._journal = self._journal, Journal()
        try:
            yield
        finally:
            self._journal = journal

    # -- groups that requests name ---------------------------------------------------------------

    def close_group(self, group_id: str, key: str | None = None) -> TrajectoryGroup:
        """Lets no more members into a group; see `GroupRewards.close`. A closed one stays as it is.

        Raises:
            UnknownTrajectoryError: there is no such group.
            ConflictError: it has been trained on or dropped.
        """
        group = self._rewards.group(group_id, key)
        if not group.closed:
            self._close(group)
        return group

    def _close_if_full(self, group: TrajectoryGroup) -> None:
        if not group.closed and group.is_full:
            self._close(group)

    def _close(self, group: TrajectoryGroup) -> None:
        self._journal.noted(group.adapter, group.group_id, Closed(group.group_id, group.owner))
        self._rewards.close(group)
        self._emit("closed", **group.event_data, members=len(group.members))
        if group.scorer is not None:
            self._await_rewards(group)
        self._on_ready(group)

    # -- rewards ---------------------------------------------------------------------------------

    def group_of(self, entry: GroupEntry) -> TrajectoryGroup:
        """The group that an entry is for, if `apply` would take the entry now. Raises what `GroupRewards.group_of`
        does."""
        return self._rewards.group_of(entry)

    def apply(self, entry: GroupEntry) -> None:
        """Sets a reward, or closes a group; see the methods below."""
        match entry:
            case Feedback(trajectory_id, score, user):
                self.feedback(trajectory_id, score, user)
            case TokenRewards(trajectory_id, rewards):
                self.reward_tokens(trajectory_id, rewards)
            case EpisodeReward(episode_id, group_id, score, key):
                self.reward_episode(episode_id, group_id, score, key)
            case Closed(group_id, key):
                self.close_group(group_id, key)
            case Score(trajectory_id, reward):
                self._on_ready(self._rewards.score_member(trajectory_id, reward))

    def feedback(self, trajectory_id: str, score: float, user: str = "") -> None:
        """See `Collector.feedback`. Raises InvalidRequestError if the score is not a finite number."""
        check_finite("score", score)
        self._rewarded(self._rewards.feedback(trajectory_id, score, user), trajectory_id=trajectory_id, score=score)

    def reward_episode(self, episode_id: str, group_id: str, score: float, key: str | None = None) -> None:
        """See `Collector.reward_episode`. Raises InvalidRequestError if the score is not a finite number."""
        check_finite("score", score)
        name = group_of_episode(episode_id, group_id)
        group = self._rewards.reward_episode(name, episode_id, score, key)
        self._rewarded(group, episode_id=episode_id, score=score)

    def reward_tokens(self, trajectory_id: str, rewards: Sequence[float]) -> None:
        """See `Collector.reward_tokens`. Raises InvalidRequestError if one is not a finite number."""
        check_finite("token_rewards", *rewards)
        group = self._rewards.reward_tokens(trajectory_id, rewards)
        self._rewarded(group, trajectory_id=trajectory_id, score=math.fsum(rewards))

    def _rewarded(self, group: TrajectoryGroup, **data: object) -> None:
        self._close_if_full(group)
        self._emit("scored", **group.event_data, complete=group.complete, **data)
        self._on_ready(group)

    async def close(self) -> None:
        """Cancels all scoring."""
        await self._scoring.close()

    def _expire(self, key: GroupKey) -> None:
        """Drops the members that still have no reward. The argument is not a group, so that the timer does not keep an
        ended group in memory."""
        owner, group_id = key
        if (group := self._buffer.find(group_id, owner)) is not None:
            self._rewards.expire(group_id, owner)
            self._on_ready(group)
