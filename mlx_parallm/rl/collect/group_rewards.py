"""GroupRewards: sets the rewards of the members of groups, and says which ones still count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownTrajectoryError, shown
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.groups import DropReason, GroupMember, TrajectoryGroup, TrajectoryState, group_name
from mlx_parallm.rl.runs.records import Closed, EpisodeReward, Feedback, GroupEntry, Score, TokenRewards

MAX_PEOPLE = 1000
"""Most users whose opinions of one answer are kept."""


class GroupRewards:
    """Changes the groups of a buffer. It has no state of its own."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        self._buffer = buffer

    # -- what still counts -----------------------------------------------------------------------

    def group_of(self, entry: GroupEntry) -> TrajectoryGroup:
        """The group that an entry is for, if it could be applied now.

        Raises:
            InvalidRequestError: a reward is not a finite number, or there is not one for each token.
            UnknownTrajectoryError: what it is for is not known, or forgotten.
            ConflictError: it was taken for training, or dropped; or too many people have judged the answer.
        """
        match entry:
            case Feedback(trajectory_id, score, user, key):
                check_finite("score", score)
                group, member = self.open_answer(trajectory_id, key=key)
                opinions = member.opinions.get(trajectory_id, {})
                if user not in opinions and len(opinions) >= MAX_PEOPLE:
                    raise ConflictError(f"{MAX_PEOPLE} people have judged this answer; no more can.", param="user")
                return group
            case TokenRewards(trajectory_id, rewards, key):
                check_finite("token_rewards", *rewards)
                return self.open_answer(trajectory_id, len(rewards), key)[0]
            case EpisodeReward(episode_id, group_id, score, key):
                check_finite("score", score)
                return self.open_episode(group_of_episode(episode_id, group_id), episode_id, key)[0]
            case Closed(group_id, key):
                return self.group(group_id, key)
            case Score(trajectory_id):
                return self.open_answer(trajectory_id)[0]

    def group(self, group_id: str, key: str | None = None) -> TrajectoryGroup:
        """A group that has not left. `key`: its owner; None: any.

        Raises:
            UnknownTrajectoryError: there is none of this id.
            ConflictError: it has been trained on or dropped.
        """
        if (group := self._buffer.find(group_id, key)) is None:
            if self._buffer.has_left(group_id, key):
                raise ConflictError("The group has been trained on or dropped already.", param="group_id")
            raise UnknownTrajectoryError(f"No group {shown(group_id)} has been collected.", param="group_id")
        return group

    def open_answer(
        self, trajectory_id: str, tokens: int | None = None, key: str | None = None
    ) -> tuple[TrajectoryGroup, GroupMember]:
        """The member with this trajectory, and its group, if feedback still counts. `tokens`: of the answer, if known.
        `key`: the API key that judges it; None: it may judge those of all keys.

        Raises:
            UnknownTrajectoryError: no such trajectory, it is forgotten, or it is another key's.
            ConflictError: it was taken for training, or dropped.
            InvalidRequestError: it has another number of tokens.
        """
        known = self._buffer.member(trajectory_id)
        turn = None if known is None else known[1].turn(trajectory_id)
        if known is None or turn is None or (key is not None and turn.owner not in (key, "")):
            raise UnknownTrajectoryError("No trajectory has this id, or it is forgotten by now.", param="trajectory_id")
        group, member = known
        _check_open(member, "trajectory_id")
        if tokens not in (None, len(turn.completion_ids)):
            raise InvalidRequestError(
                f"The answer has {len(turn.completion_ids)} tokens, and there are {tokens} rewards; send one for each "
                "token.",
                param="token_rewards",
            )
        return group, member

    def open_episode(
        self, group_id: str, episode_id: str, key: str | None = None
    ) -> tuple[TrajectoryGroup, GroupMember]:
        """An episode, and its group, if feedback still counts. `key`: the owner of the group; None: any.

        Raises:
            UnknownTrajectoryError: there is no such episode, or it is forgotten.
            ConflictError: it was taken for training, or dropped.
        """
        group = self._buffer.find(group_id, key)
        member = None if group is None else group.episode(episode_id)
        if group is None or member is None:
            if self._buffer.has_left(group_id, key):
                raise ConflictError("The group has been trained on or dropped already.", param="episode_id")
            raise UnknownTrajectoryError("No turn of this episode has been collected.", param="episode_id")
        _check_open(member, "episode_id")
        return group, member

    # -- rewards ---------------------------------------------------------------------------------

    def feedback(self, trajectory_id: str, score: float, user: str = "") -> TrajectoryGroup:
        """Adds an opinion of an answer, or of one turn of an episode; see `GroupMember.rate`. Returns its group.

        Raises:
            UnknownTrajectoryError, ConflictError: see `open_answer`.
        """
        group, member = self.open_answer(trajectory_id)
        member.rate(member.turn(trajectory_id), score, user)
        return group

    def reward_tokens(self, trajectory_id: str, rewards: Sequence[float]) -> TrajectoryGroup:
        """Sets the rewards of the tokens of one answer, in place of earlier ones. Returns its group.

        Raises:
            InvalidRequestError: there is not one for each token.
            UnknownTrajectoryError, ConflictError: see `open_answer`.
        """
        group, member = self.open_answer(trajectory_id, tokens=len(rewards))
        member.reward_tokens(member.turn(trajectory_id), tuple(rewards))
        return group

    def reward_episode(self, group_id: str, episode_id: str, score: float, key: str | None = None) -> TrajectoryGroup:
        """Sets the reward of an episode, in place of an earlier one. Returns its group.

        Raises:
            UnknownTrajectoryError, ConflictError: see `open_episode`.
        """
        group, member = self.open_episode(group_id, episode_id, key)
        member.set_reward(score)
        return group

    def score_member(self, trajectory_id: str, reward: float) -> TrajectoryGroup:
        """Sets a scorer's reward of one member, unless it has feedback. Returns its group. Raises what `open_answer`
        does."""
        group, member = self.open_answer(trajectory_id)
        if member.state is TrajectoryState.WAITING:
            member.own_reward, member.state = reward, TrajectoryState.SCORED
        return group

    def score(self, group: TrajectoryGroup, rewards: Sequence[float]) -> None:
        """Sets a scorer's rewards, in order of the members. Members with feedback keep their rewards."""
        for member, reward in zip(group.members, rewards, strict=True):
            if member.state is TrajectoryState.WAITING:
                member.own_reward, member.state = reward, TrajectoryState.SCORED

    def close(self, group: TrajectoryGroup) -> None:
        """Lets no more members into a group. Episodes that have rewards of turns or tokens are scored by these. Members
        without a reward are dropped, unless a scorer will give them one."""
        group.closed = True
        for member in group.waiting:
            if member.token_rewards and group.scorer is None:
                member.state = TrajectoryState.SCORED
        if group.scorer is None:
            self._buffer.drop(group, DropReason.UNREWARDED, group.waiting)

    def expire(self, group_id: str, owner: str = "") -> None:
        """Drops the members without a reward, because the time limit for rewards has passed."""
        if (group := self._buffer.find(group_id, owner)) is not None:
            group.closed = True
            self._buffer.drop(group, DropReason.TIMEOUT, group.waiting)


def group_of_episode(episode_id: str, group_id: str) -> str:
    """The id of the group of an episode, which its client may have left out."""
    return group_name(CollectionSpec(group_id=group_id, episode_id=episode_id))


def check_finite(param: str, *rewards: float) -> None:
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
