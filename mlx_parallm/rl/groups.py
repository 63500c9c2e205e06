"""Groups: puts answers into groups, gets their rewards, and ends them.

answers ─▶ add ─▶ TrajectoryGroup ─▶ closed ─▶ scorer, or rewards of clients ─▶ complete: an update can take it
                        └─ refused · full buffer · scorer failed · time limit · closed without a reward ─▶ dropped

`DropReason` has all reasons of drops, those of updates included.

Every reward is an entry of the journal and is set in one method, whoever gave it: a scorer, a client, or people.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError, InvalidRequestError, RequestError, UnknownTrajectoryError, shown
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Arrival, Closed, EpisodeReward, Feedback, GroupEntry, Score, TokenRewards
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.trajectories import DropReason, GroupMember, TrajectoryGroup, TrajectoryState, group_name
from mlx_parallm.tasks import spawn

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


class Groups:
    """Changes the groups of a buffer. Event loop's thread only.

    Attributes:
        turns: turns of episodes by adapter name and kind.

    Args:
        journal: gets the rewards of scorers. What clients send is in it before the methods here are called.
        on_ready: called with a group whenever it may have become complete, or other groups of its adapter may be taken.
    """

    def __init__(
        self,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        config: RLTrainingConfig,
        journal: Journal,
        on_ready: Callable[[TrajectoryGroup], None],
        emit: Emit,
    ) -> None:
        self._buffer, self._scorers, self._config = buffer, scorers, config
        self._journal, self._on_ready, self._emit = journal, on_ready, emit
        self.turns: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._scoring: set[asyncio.Task[None]] = set()

    @property
    def in_scoring(self) -> int:
        """The number of groups whose scoring functions are at work."""
        return len(self._scoring)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)

    # -- answers ---------------------------------------------------------------------------------

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

    def add(
        self,
        adapter: str,
        trajectories: Sequence[Trajectory],
        refused: DropReason | None = None,
        entries: Sequence[GroupEntry] = (),
    ) -> Added:
        """Adds answers to one prompt, or episodes of one task, that came together.

        Args:
            refused: why they cannot be trained on; None if they can.
            entries: their rewards and the end of their group, if these came with them.
        """
        first = trajectories[0]
        known = self._buffer.member(first.trajectory_id)
        if entries and known is not None and self._buffer.holds(known[0]):  # another opinion has made this late copy
            self._set_all(known[0], entries)
            return Added(None, apart=False)
        group, refused = self._put(adapter, trajectories, refused)
        kinds = _kinds_of_turns(group, trajectories)
        self.turns[adapter].update(kinds)
        version = None if first.adapter is None else str(first.adapter)
        data = {**group.event_data, "group_id": first.group_id}
        self._emit("collected", **data, version=version, trajectories=len(trajectories))
        if refused is not None:
            self._buffer.drop(group, refused)
        if not self._buffer.holds(group):
            return Added(group.members[-1].reason, TurnKind.APART in kinds)
        if entries:
            self._set_all(group, entries)
        elif group.closed:
            self._await_rewards(group)
        else:
            self._close_if_full(group)
        return Added(None, TurnKind.APART in kinds)

    def _put(
        self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None
    ) -> tuple[TrajectoryGroup, DropReason | None]:
        """Puts answers into the group that they name, or into a new one. Refused answers are a group of their own,
        because that of their id may go on. Returns the group, and why the answers are refused."""
        first = trajectories[0]
        key = (first.group_id, first.owner or "")
        group = self._buffer.find(*key)
        closed = group.closed or group.adapter != adapter if group else self._buffer.has_left(*key)
        refused = refused or (DropReason.CLOSED if closed and group_name(first.collection) else None)
        if group is not None and refused is None:
            self._buffer.extend(group, trajectories)
            return group, None
        group = TrajectoryGroup(adapter, trajectories)
        if refused is not None:
            group.group_id, group.closed = first.trajectory_id, True
        self._buffer.add(group)
        if not group.closed:
            self._expire_after(self._config.feedback_timeout_s, group)
        return group, refused

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
        journal, self._journal = self._journal, Journal()  # which has all of this already
        try:
            for entry in entries:
                try:
                    if isinstance(entry, Arrival):
                        self.add(adapter, entry.trajectories, reason_against(entry.trajectories[0].adapter))
                    else:
                        self.apply(entry)
                except RequestError:
                    left_out += [entry] if isinstance(entry, Feedback) else []
        finally:
            self._journal = journal
        return left_out

    # -- rewards ---------------------------------------------------------------------------------

    def group_of(self, entry: GroupEntry) -> TrajectoryGroup:
        """The group that an entry is for, if the entry can be applied now.

        Raises:
            InvalidRequestError: a reward is not a finite number, or there is not one for each token.
            UnknownTrajectoryError: what it is for is not known, or forgotten, or another key's.
            ConflictError: it was taken for training, or dropped; or too many people have judged the answer.
        """
        return self._held_group(entry.group_id, entry.key) if isinstance(entry, Closed) else self._target(entry)[0]

    def apply(self, entry: GroupEntry) -> TrajectoryGroup:
        """Sets a reward, or closes a group. Raises what `group_of` does."""
        group = self._set(entry)
        match entry:
            case Feedback(trajectory_id, score):
                self._rewarded(group, trajectory_id=trajectory_id, score=score)
            case TokenRewards(trajectory_id, rewards):
                self._rewarded(group, trajectory_id=trajectory_id, score=math.fsum(rewards))
            case EpisodeReward(episode_id, score=score):
                self._rewarded(group, episode_id=episode_id, score=score)
            case Score():
                self._on_ready(group)
        return group

    def _set_all(self, group: TrajectoryGroup, entries: Sequence[GroupEntry]) -> None:
        """Sets the rewards that came with a group."""
        for entry in entries:
            self._set(entry)
        if self._buffer.holds(group):
            rewards = [member.reward for member in group.members]
            self._emit("scored", **group.event_data, complete=group.complete, rewards=rewards)
        self._on_ready(group)

    def _set(self, entry: GroupEntry) -> TrajectoryGroup:
        """The only place where rewards are set."""
        if isinstance(entry, Closed):
            group = self._held_group(entry.group_id, entry.key)
            self._close(group)
            return group
        group, member = self._target(entry)
        match entry:
            case Feedback(trajectory_id, score, user):
                member.rate(member.turn(trajectory_id), score, user)
            case TokenRewards(trajectory_id, rewards):
                member.reward_tokens(member.turn(trajectory_id), rewards)
            case EpisodeReward(score=score):
                member.set_reward(score)
            case Score(reward=reward):
                member.score(reward)
        return group

    def _rewarded(self, group: TrajectoryGroup, **data: object) -> None:
        self._close_if_full(group)
        self._emit("scored", **group.event_data, complete=group.complete, **data)
        self._on_ready(group)

    # -- what an entry is for --------------------------------------------------------------------

    def _target(self, entry: Feedback | TokenRewards | EpisodeReward | Score) -> tuple[TrajectoryGroup, GroupMember]:
        """The group and the member that an entry rewards. Raises what `group_of` does."""
        match entry:
            case Feedback(trajectory_id, score, user, key):
                _check_finite("score", score)
                group, member = self._open_answer(trajectory_id, key)
                opinions = member.opinions.get(trajectory_id, {})
                if user not in opinions and len(opinions) >= MAX_PEOPLE:
                    raise ConflictError(f"{MAX_PEOPLE} people have judged this answer; no more can.", param="user")
            case TokenRewards(trajectory_id, rewards, key):
                _check_finite("token_rewards", *rewards)
                group, member = self._open_answer(trajectory_id, key)
                tokens = len(member.turn(trajectory_id).completion_ids)
                if len(rewards) != tokens:
                    raise InvalidRequestError(
                        f"The answer has {tokens} tokens, and there are {len(rewards)} rewards; send one for each "
                        "token.",
                        param="token_rewards",
                    )
            case EpisodeReward(episode_id, group_id, score, key):
                _check_finite("score", score)
                group, member = self._open_episode(group_of_episode(episode_id, group_id), episode_id, key)
            case Score(trajectory_id):
                group, member = self._open_answer(trajectory_id, None)
        return group, member

    def _held_group(self, group_id: str, key: str | None) -> TrajectoryGroup:
        """A group that has not left. `key`: its owner; None: any."""
        if (group := self._buffer.find(group_id, key)) is None:
            if self._buffer.has_left(group_id, key):
                raise ConflictError("The group has been trained on or dropped already.", param="group_id")
            raise UnknownTrajectoryError(f"No group {shown(group_id)} has been collected.", param="group_id")
        return group

    def _open_answer(self, trajectory_id: str, key: str | None) -> tuple[TrajectoryGroup, GroupMember]:
        """The member with this trajectory, and its group. `key`: the API key that judges it; None: it may judge those
        of all keys."""
        known = self._buffer.member(trajectory_id)
        if known is None or (key is not None and known[1].turn(trajectory_id).owner not in (key, "")):
            raise UnknownTrajectoryError("No trajectory has this id, or it is forgotten by now.", param="trajectory_id")
        _check_open(known[1], "trajectory_id")
        return known

    def _open_episode(self, group_id: str, episode_id: str, key: str | None) -> tuple[TrajectoryGroup, GroupMember]:
        """An episode, and its group. `key`: the owner of the group; None: any."""
        group = self._buffer.find(group_id, key)
        member = None if group is None else group.episode(episode_id)
        if group is None or member is None:
            if self._buffer.has_left(group_id, key):
                raise ConflictError("The group has been trained on or dropped already.", param="episode_id")
            raise UnknownTrajectoryError("No turn of this episode has been collected.", param="episode_id")
        _check_open(member, "episode_id")
        return group, member

    # -- the end of a group ----------------------------------------------------------------------

    def _close_if_full(self, group: TrajectoryGroup) -> None:
        if not group.closed and group.is_full:
            self._journal.noted(group.adapter, group.group_id, Closed(group.group_id, group.owner))
            self._close(group)

    def _close(self, group: TrajectoryGroup) -> None:
        """Lets no more members into a group; a closed one stays as it is. Episodes that have rewards of turns or tokens
        are scored by these. Members without a reward are dropped, unless a scorer will give them one."""
        if group.closed:
            return
        group.closed = True
        if group.scorer is None:
            for member in group.waiting:
                if member.token_rewards:
                    member.state = TrajectoryState.SCORED
            self._buffer.drop(group, DropReason.UNREWARDED, group.waiting)
        self._emit("closed", **group.event_data, members=len(group.members))
        if group.scorer is not None:
            self._await_rewards(group)
        self._on_ready(group)

    def _await_rewards(self, group: TrajectoryGroup) -> None:
        """Starts the scorer of a group to which no more members come, and the time limit for its rewards."""
        if group.scorer is None:
            self._expire_after(self._config.feedback_timeout_s, group)
            return
        self._expire_after(self._config.group_timeout_s, group)
        task = spawn(self._score(group), _log, f"scoring {group.group_id}")
        self._scoring.add(task)
        task.add_done_callback(self._scoring.discard)

    async def _score(self, group: TrajectoryGroup) -> None:
        """Asks the scoring function of a complete group for its rewards. A scorer that hangs is killed after
        `rl_training.scoring_timeout_s`, but for a reward model, which runs on the device and has only the time of the
        group. The members without a reward are dropped then, as when a scorer fails; those that clients have rewarded
        meanwhile keep their rewards."""
        if not group.waiting:  # after a restart, the journal had the rewards
            return
        try:
            rewards = await self._scorers.score([member.trajectory for member in group.members])
        except Exception as error:  # noqa: BLE001 - a failing scorer must affect only its own group
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)
        else:
            for member, reward in zip(group.members, rewards, strict=True):
                if member.state is TrajectoryState.WAITING:
                    entry = Score(member.trajectory.trajectory_id, reward)
                    self._journal.noted(group.adapter, group.group_id, entry)
                    self._set(entry)
            self._emit("scored", **group.event_data, complete=group.complete, rewards=list(rewards))
        self._on_ready(group)

    def _expire_after(self, timeout_s: float | None, group: TrajectoryGroup) -> None:
        """Sets a time limit for the rewards of a group. The timer gets no group, so it keeps none in memory."""
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self.expire, group.group_id, group.owner)

    def expire(self, group_id: str, owner: str = "") -> None:
        """Drops the members without a reward, because the time limit for rewards has passed."""
        if (group := self._buffer.find(group_id, owner)) is not None:
            group.closed = True
            self._buffer.drop(group, DropReason.TIMEOUT, group.waiting)
            self._on_ready(group)


def group_of_episode(episode_id: str, group_id: str) -> str:
    """The id of the group of an episode, which its client may have left out."""
    return group_name(CollectionSpec(group_id=group_id, episode_id=episode_id))


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


def _check_finite(param: str, *rewards: float) -> None:
    """Raises InvalidRequestError, which names `param`, if one is not a finite number."""
    if not all(map(math.isfinite, rewards)):
        raise InvalidRequestError(f"{param}: a reward must be a finite number.", param=param)


def _check_open(member: GroupMember, param: str) -> None:
    """Raises ConflictError if feedback on a member counts no longer."""
    if member.state is TrajectoryState.DROPPED:
        raise ConflictError(f"The trajectory was dropped ({member.reason}): it will not be trained on.", param=param)
    if not member.is_open:
        raise ConflictError(
            "The trajectory was taken for training already; feedback counts only before that.", param=param
        )
