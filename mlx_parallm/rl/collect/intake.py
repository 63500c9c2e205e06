"""Intake: how trajectories come into the buffer, and how they get their rewards."""

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
from mlx_parallm.errors import ConflictError, InvalidRequestError, RequestError, UnknownTrajectoryError, shown
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.groups import DropReason, GroupMember, TrajectoryGroup, group_name
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Arrival, Closed, EpisodeReward, Feedback, GroupEntry, Score, TokenRewards
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService

MAX_PEOPLE = 1000
"""Most users whose opinions of one answer are kept."""

_log = logging.getLogger(__name__)


class TurnKind(StrEnum):
    """What a turn is to its episode. CONTINUED: its prompt continues the tokens of an earlier turn. APART: it does not,
    so it becomes a sample of its own."""

    FIRST = "first"
    CONTINUED = "continued"
    APART = "apart"


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
        self._scoring: set[asyncio.Task[None]] = set()

    @property
    def in_scoring(self) -> int:
        """Groups whose scoring functions are at work."""
        return len(self._scoring)

    def check(self, collection: CollectionSpec, adapter: str) -> None:
        """Checks before generation that the group that a request names will take its answers.

        Raises:
            InvalidRequestError: the group has another size or scorer.
            ConflictError: the group is closed, or trains another adapter.
        """
        name = group_name(collection)
        group = self._buffer.find(name) if name else None
        if (group is not None and group.closed) or (group is None and name and self._buffer.has_left(name)):
            raise ConflictError(f"The group {shown(name)} is closed; use another group_id.", param="group_id")
        if group is None:
            return
        if group.adapter != adapter:
            raise ConflictError(f"The group {shown(name)} trains {group.adapter}, not {adapter}.", param="group_id")
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
        group = self._buffer.find(first.group_id)
        closed = group.closed or group.adapter != adapter if group else self._buffer.has_left(first.group_id)
        refused = refused or (DropReason.CLOSED if closed and group_name(first.collection) else None)
        if refused is not None or group is None:
            group = self._begin(adapter, trajectories, refused)
        else:
            self._buffer.extend(group, trajectories)
        kinds = _kinds_of_turns(group, trajectories)
        self.turns[adapter].update(kinds)
        self._emit(
            "collected",
            adapter=adapter,
            group_id=first.group_id,
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
            if (group := self._buffer.find(trajectories[0].group_id)) is not None:
                rewards = [member.reward for member in group.members]
                self._emit("scored", adapter=adapter, group_id=group.group_id, complete=group.complete, rewards=rewards)
        return added

    def give(self, adapter: str, trajectories: Sequence[Trajectory], entries: Sequence[Score | Feedback]) -> None:
        """Adds a group that came with its rewards."""
        group = TrajectoryGroup(adapter, trajectories)
        self._buffer.add(group)
        of_group = {"adapter": adapter, "group_id": group.group_id}
        self._emit("collected", **of_group, version=None, trajectories=len(trajectories))
        for entry in entries:
            if isinstance(entry, Score):
                self._buffer.score_member(entry.trajectory_id, entry.reward)
            else:
                self._buffer.feedback(entry.trajectory_id, entry.score, entry.user)
        rewards = [member.reward for member in group.members]
        self._emit("scored", **of_group, complete=group.complete, rewards=rewards)
        self._on_ready(group)

    def _begin(self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None) -> TrajectoryGroup:
        """Adds a new group. Refused answers are a group of their own, because that of their id may go on."""
        group = TrajectoryGroup(adapter, trajectories)
        if refused is not None:
            group.group_id, group.closed = trajectories[0].trajectory_id, True
        self._buffer.add(group)
        if not group.closed and (timeout_s := self._config.feedback_timeout_s) is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, group.group_id)
        return group

    def _await_rewards(self, group: TrajectoryGroup) -> None:
        """Starts the scorer of a group to which no more members come, and the time limit for its rewards."""
        if not self._buffer.holds(group):
            return
        timeout_s = self._config.feedback_timeout_s if group.scorer is None else self._config.group_timeout_s
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, group.group_id)
        if group.scorer is not None:
            task = asyncio.create_task(self._score(group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

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

    def close_group(self, group_id: str) -> TrajectoryGroup:
        """Lets no more members into a group; see `TrajectoryBuffer.close`. A closed one stays as it is.

        Raises:
            UnknownTrajectoryError: there is no such group.
            ConflictError: it has been trained on or dropped.
        """
        group = self._group(group_id)
        if not group.closed:
            self._close(group)
        return group

    def _group(self, group_id: str) -> TrajectoryGroup:
        if (group := self._buffer.find(group_id)) is None:
            if self._buffer.has_left(group_id):
                raise ConflictError("The group has been trained on or dropped already.", param="group_id")
            raise UnknownTrajectoryError(f"No group {shown(group_id)} has been collected.", param="group_id")
        return group

    def _close_if_full(self, group: TrajectoryGroup) -> None:
        if not group.closed and group.is_full:
            self._close(group)

    def _close(self, group: TrajectoryGroup) -> None:
        self._journal.noted(group.adapter, group.group_id, Closed(group.group_id))
        self._buffer.close(group)
        self._emit("closed", adapter=group.adapter, group_id=group.group_id, members=len(group.members))
        if group.scorer is not None:
            self._await_rewards(group)
        self._on_ready(group)

    # -- rewards ---------------------------------------------------------------------------------

    def group_of(self, entry: GroupEntry) -> TrajectoryGroup:
        """The group that an entry is for, if `apply` would take the entry now.

        Raises:
            InvalidRequestError, UnknownTrajectoryError, ConflictError: those of `apply`.
        """
        match entry:
            case Feedback(trajectory_id, score, user):
                _check_finite("score", score)
                group, member = self._buffer.open_answer(trajectory_id)
                opinions = member.opinions.get(trajectory_id, {})
                if user not in opinions and len(opinions) >= MAX_PEOPLE:
                    raise ConflictError(f"{MAX_PEOPLE} people have judged this answer; no more can.", param="user")
                return group
            case TokenRewards(trajectory_id, rewards):
                _check_finite("token_rewards", *rewards)
                return self._buffer.open_answer(trajectory_id, len(rewards))[0]
            case EpisodeReward(episode_id, group_id, score):
                _check_finite("score", score)
                return self._buffer.open_episode(_group_of_episode(episode_id, group_id), episode_id)[0]
            case Closed(group_id):
                return self._group(group_id)
            case Score(trajectory_id):
                return self._buffer.open_answer(trajectory_id)[0]

    def apply(self, entry: GroupEntry) -> None:
        """Sets a reward, or closes a group; see the methods below."""
        match entry:
            case Feedback(trajectory_id, score, user):
                self.feedback(trajectory_id, score, user)
            case TokenRewards(trajectory_id, rewards):
                self.reward_tokens(trajectory_id, rewards)
            case EpisodeReward(episode_id, group_id, score):
                self.reward_episode(episode_id, group_id, score)
            case Closed(group_id):
                self.close_group(group_id)
            case Score(trajectory_id, reward):
                self._on_ready(self._buffer.score_member(trajectory_id, reward))

    def feedback(self, trajectory_id: str, score: float, user: str = "") -> None:
        """See `core.PeopleClient.feedback`. Raises InvalidRequestError if the score is not a finite number."""
        _check_finite("score", score)
        self._rewarded(self._buffer.feedback(trajectory_id, score, user), trajectory_id=trajectory_id, score=score)

    def reward_episode(self, episode_id: str, group_id: str, score: float) -> None:
        """See `core.TrainingClient.reward_episode`. Raises InvalidRequestError if the score is not a finite number."""
        _check_finite("score", score)
        name = _group_of_episode(episode_id, group_id)
        self._rewarded(self._buffer.reward_episode(name, episode_id, score), episode_id=episode_id, score=score)

    def reward_tokens(self, trajectory_id: str, rewards: Sequence[float]) -> None:
        """See `core.TrainingClient.reward_tokens`. Raises InvalidRequestError if one is not a finite number."""
        _check_finite("token_rewards", *rewards)
        group = self._buffer.reward_tokens(trajectory_id, rewards)
        self._rewarded(group, trajectory_id=trajectory_id, score=math.fsum(rewards))

    def _rewarded(self, group: TrajectoryGroup, **data: object) -> None:
        self._close_if_full(group)
        of_group = {"adapter": group.adapter, "group_id": group.group_id, "complete": group.complete}
        self._emit("scored", **of_group, **data)
        self._on_ready(group)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)

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
            self._buffer.score(group, rewards)
            of_group = {"adapter": group.adapter, "group_id": group.group_id, "complete": group.complete}
            self._emit("scored", **of_group, rewards=list(rewards))
        self._on_ready(group)

    def _expire(self, group_id: str) -> None:
        """Drops the members that still have no reward. The argument is an id and not a group, so that the timer does
        not keep an ended group in memory."""
        if (group := self._buffer.find(group_id)) is not None:
            self._buffer.expire(group_id)
            self._on_ready(group)


def _kinds_of_turns(group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> list[TurnKind]:
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


def _group_of_episode(episode_id: str, group_id: str) -> str:
    return group_name(CollectionSpec(group_id=group_id, episode_id=episode_id))


def _check_finite(param: str, *rewards: float) -> None:
    if not all(map(math.isfinite, rewards)):
        raise InvalidRequestError(f"{param}: a reward must be a finite number.", param=param)
