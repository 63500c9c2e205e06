"""TrajectoryGroup: members whose rewards are compared with each other, their states, and why they are dropped.

A member is one answer, or an episode of several answers. A group without an id of its own comes with one request and is
closed at once. A group that requests name with `group_id` or `episode_id` stays open until it has its members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import fsum

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec, FinishReason, Signal
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory

ABOUT = "about"
"""The key in the metadata of an edit that has the id of the trajectory which was edited."""

FEEDBACK = "feedback"
"""Used in place of a scorer's name for groups whose rewards came from people."""


class TrajectoryState(StrEnum):
    """State of a member: it waits for a reward, it waits for an update, an update is using it, or it has ended."""

    WAITING = "waiting"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a trajectory was not trained on, and in brackets who decides that. `TrajectoryBuffer.drops`
    counts them all. Episodes that fail while they are sampled come to no group; see `rl.rollouts.episodes`."""

    BUFFER_FULL = "buffer_full"
    """Newer trajectories needed its room in the buffer, or it found none (`TrajectoryBuffer`)."""
    STALE = "stale"
    """Its version is more than `max_staleness` versions old (`AdapterRun.reason_against`)."""
    ZERO_VARIANCE = "zero_variance"
    """There is nothing to learn from the rewards or advantages of its group: mostly, all are equal. It is decided when
    a group is complete (`GroupSelection.look`) and again by an update (`objectives.prepare`)."""
    SINGLE = "single"
    """There is no other reward to compare its reward with (as for ZERO_VARIANCE)."""
    LOW_REWARD = "low_reward"
    """The loss is cross_entropy, and the reward does not exceed the threshold (`GroupSelection`,
    `objectives.prepare`)."""
    SCORING_FAILED = "scoring_failed"
    """The scoring function of its group raised, or took too long (`Groups._score`)."""
    TIMEOUT = "timeout"
    """It had no reward when the time limit of its group passed (`Groups.expire`)."""
    ABORTED = "aborted"
    """Its request did not finish (`Collector.collect`)."""
    UNKNOWN_VERSION = "unknown_version"
    """The version that sampled it is not in the version history of its adapter, or the adapter is not in training
    (`AdapterRun.reason_against`, `Collector`)."""
    SKIPPED = "skipped"
    """Its update was skipped (`AdapterRun`)."""
    HELD = "held"
    """The gate refused its update (`AdapterRun`)."""
    REPLACED = "replaced"
    """The same turn of its episode, or another edit of the same answer, came (`TrajectoryBuffer.extend`, `People`)."""
    UNREWARDED = "unrewarded"
    """Its group was closed before it had a reward (`Groups._close`)."""
    CLOSED = "closed"
    """Its group had been closed before it came (`Groups.add`)."""
    NOT_RECORDED = "not_recorded"
    """The journal of the run could not be written when it came (`Collector`)."""
    FORGOTTEN = "forgotten"
    """It, or another answer of its group, is to be forgotten (`extras.forgetting`)."""
    STOPPED = "stopped"
    """Its lesson has ended (`extras.lessons.service`), or the training of its adapter (`TrainingService.stop`)."""


NEVER_COLLECTED = (DropReason.ABORTED, DropReason.NOT_RECORDED)
"""The reasons of trajectories that never came into the buffer."""


Turn = Trajectory | GivenTrajectory


def owner_of(turns: Iterable[Turn]) -> str | None:
    """Who sent all of these; see `Trajectory.owner`. None: that is not known, or several keys did."""
    owners = {turn.owner for turn in turns}
    return owners.pop() if len(owners) == 1 else None


def finish_reason(turn: Turn) -> FinishReason | None:
    """Why a turn ended; None if it is unknown."""
    return turn.finish_reason if isinstance(turn, Trajectory) else None


@dataclass(eq=False, slots=True)
class Episode:
    """One answer, or several answers of which later ones may continue earlier ones.

    Attributes:
        turns: in order; at least one.
        token_rewards: for each turn, one reward for each token of its completion, or none. They are part of the
            episode's reward. Empty: no token has one.
    """

    turns: Sequence[Turn]
    token_rewards: Sequence[tuple[float, ...]] = ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the last turn ended; None if it is unknown."""
        return finish_reason(self.turns[-1])

    @property
    def completion_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(turn.trained_tokens for turn in self.turns)

    @property
    def has_advantages(self) -> bool:
        """Whether a client gave the advantages of all its tokens."""
        return all(turn.advantages for turn in self.turns)

    def rewards_before(self, turn: int) -> float:
        """The sum of the rewards of the tokens of all turns before this one."""
        return fsum(chain.from_iterable(self.token_rewards[:turn]))


@dataclass(eq=False, slots=True)
class GroupMember(Episode):
    """An episode that was collected, while it gets its rewards and until it has ended. A client's reward of a turn
    counts for its last token.

    Attributes:
        own_reward: of the episode as a whole; None: there is none yet.
        opinions: of people, by trajectory id and user; the user is empty if it is unknown.
        reason: set when it is dropped.
        from_feedback: its reward came from a client and not from a scorer.
        advantage: as the last update that took it has computed it; None: no update has.
    """

    turns: list[Trajectory]
    token_rewards: list[tuple[float, ...]] = field(default_factory=list)
    own_reward: float | None = None
    state: TrajectoryState = TrajectoryState.WAITING
    reason: DropReason | None = None
    from_feedback: bool = False
    opinions: dict[str, dict[str, float]] = field(default_factory=dict)
    advantage: float | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The answer, or the last one of an episode."""
        return self.turns[-1]

    @property
    def reward(self) -> float | None:
        """Its own reward and those of its tokens, summed. None if it has neither."""
        if self.own_reward is None and not self.token_rewards:
            return None
        return fsum([self.own_reward or 0.0, *chain.from_iterable(self.token_rewards)])

    @property
    def is_open(self) -> bool:
        """Whether no update has taken it, and it was not dropped."""
        return self.state in (TrajectoryState.WAITING, TrajectoryState.SCORED)

    def continues(self, turn: Trajectory) -> bool:
        """Whether a turn's prompt begins with all tokens of an earlier turn, so that both can be one sample."""
        earlier = (other.prompt_ids + other.completion_ids for other in self.turns if other is not turn)
        return any(turn.prompt_ids[: len(ids)] == ids for ids in earlier)

    def add_turn(self, turn: Trajectory) -> Trajectory | None:
        """Adds a turn of an episode in its place: by its number, or else at the end.

        Returns:
            The turn that it replaces, because it has the same number; None if there is none.
        """
        number, at = turn.collection.turn, len(self.turns)
        if number is not None:
            numbers = [other.collection.turn for other in self.turns]
            if number in numbers:
                return self._replace(numbers.index(number), turn)
            at = next((place for place, other in enumerate(numbers) if other is not None and other > number), at)
        self.turns.insert(at, turn)
        if self.token_rewards:
            self.token_rewards.insert(at, ())
        return None

    def _replace(self, at: int, turn: Trajectory) -> Trajectory:
        """Puts a turn in place of another one, whose rewards are forgotten. Returns the other one."""
        replaced, self.turns[at] = self.turns[at], turn
        self.opinions.pop(replaced.trajectory_id, None)
        if self.token_rewards:
            self._set_token_rewards(at, ())
        return replaced

    def turn(self, trajectory_id: str) -> Trajectory:
        return next(turn for turn in self.turns if turn.trajectory_id == trajectory_id)

    def rate(self, turn: Trajectory, score: float, user: str = "") -> None:
        """Adds an opinion of an answer, or of one turn of an episode, in place of an earlier one of the same user. The
        reward is the mean over users."""
        opinions = self.opinions.setdefault(turn.trajectory_id, {})
        opinions[user] = score
        mean = fsum(opinions.values()) / len(opinions)
        if turn.collection.episode_id:
            self.reward_tokens(turn, (*(0.0,) * (len(turn.completion_ids) - 1), mean))
        else:
            self.set_reward(mean)

    def score(self, reward: float) -> None:
        """Sets a scorer's reward, unless the member has one of a client."""
        if self.state is TrajectoryState.WAITING:
            self.own_reward, self.state = reward, TrajectoryState.SCORED

    def set_reward(self, reward: float) -> None:
        """Sets a client's reward of the member as a whole."""
        self.own_reward, self.state, self.from_feedback = reward, TrajectoryState.SCORED, True

    def reward_tokens(self, turn: Trajectory, rewards: tuple[float, ...]) -> None:
        """Sets a client's rewards of the tokens of one turn. Those of an answer that is no episode are its reward."""
        self._set_token_rewards(self.turns.index(turn), rewards)
        self.from_feedback = True
        if not turn.collection.episode_id:
            self.state = TrajectoryState.SCORED

    def _set_token_rewards(self, at: int, rewards: tuple[float, ...]) -> None:
        of_turns = self.token_rewards or [()] * len(self.turns)
        of_turns[at] = rewards
        self.token_rewards = of_turns if any(of_turns) else []


def group_name(collection: CollectionSpec) -> str:
    """The id of the group that requests share; empty if the request is its own group. An episode without a group is
    the only member of one."""
    return collection.group_id or (f"episode-{collection.episode_id}" if collection.episode_id else "")


GroupKey = tuple[str, str]
"""The owner of a group, and its id."""


class TrajectoryGroup:
    """Answers to one prompt, or episodes of one task. All train the same adapter.

    Attributes:
        adapter: name of the adapter that the group trains.
        scorer: the scoring function that the request named; None: rewards come only from feedback.
        owner: the name of the API key that has sent it; empty if the server has sampled it for a task of its own, or if
            that is not known. Groups of different owners may have the same id.
        size: the number of members that have ended after which an open group is closed; None: it is closed on request.
        closed: whether no more members may be added.
        number: order of arrival, assigned by the buffer.
        seen: whether its selection has looked at it since it was complete; see `updates.selection.GroupSelection`.
        observed: whether its rewards are in the adapter's reward trend, though it waits: an update has given it back.
        divisor: what its advantages were divided by, see `GroupAdvantages`.

    Args:
        trajectories: the answers of one request.
    """

    def __init__(self, adapter: str, trajectories: Sequence[Trajectory]) -> None:
        first = trajectories[0]
        collection = first.collection
        self.adapter, self.group_id, self.scorer = adapter, first.group_id, collection.scorer
        self.owner = first.owner or ""
        self.members: list[GroupMember] = []
        self.named = bool(group_name(collection))
        self.size = collection.group_size if collection.group_id else 1
        self.closed = not self.named
        self.number = 0
        self.seen = self.observed = False
        self.divisor: float | None = None
        self._episodes: dict[str, GroupMember] = {}
        for trajectory in trajectories:
            self.add(trajectory)

    @property
    def key(self) -> GroupKey:
        """The unique key of the group."""
        return self.owner, self.group_id

    @property
    def event_data(self) -> dict[str, str | None]:
        """What each event of a group has. `key`: see `Trajectory.owner`."""
        return {"adapter": self.adapter, "group_id": self.group_id, "key": self.members[0].trajectory.owner}

    # -- members ---------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory) -> tuple[GroupMember, Trajectory | None]:
        """Adds an answer, or a turn of an episode. Returns its member, and the turn that it replaces."""
        episode = trajectory.collection.episode_id
        if episode and (member := self._episodes.get(episode)) is not None:
            return member, member.add_turn(trajectory)
        member = GroupMember([trajectory])
        self.members.append(member)
        if episode:
            self._episodes[episode] = member
        return member, None

    def episode(self, episode_id: str) -> GroupMember | None:
        return self._episodes.get(episode_id)

    def has_ended(self, member: GroupMember) -> bool:
        """Whether nothing more is expected of a member: it has its reward, or it is one answer that a scorer will
        reward. An episode ends with its reward, because nothing else tells that it has no more turns."""
        if member.state is TrajectoryState.WAITING:
            return self.scorer is not None and not member.trajectory.collection.episode_id
        return member.state is TrajectoryState.SCORED

    @property
    def is_full(self) -> bool:
        """Whether as many members have ended as the group is to have."""
        return self.size is not None and sum(map(self.has_ended, self.members)) >= self.size

    @property
    def trajectories(self) -> int:
        """The number of trajectories: each turn of an episode counts."""
        return sum(len(member.turns) for member in self.members)

    @property
    def versions(self) -> frozenset[AdapterRef]:
        """The adapter versions that sampled its trajectories, as far as they are known."""
        return frozenset(turn.adapter for member in self.members for turn in member.turns if turn.adapter is not None)

    @property
    def signal(self) -> Signal:
        """What it teaches."""
        return self.members[0].trajectory.collection.signal

    @property
    def was_given(self) -> bool:
        """Whether it was sampled elsewhere; see `atropos.groups`. The versions that sampled it are unknown."""
        return self.members[0].trajectory.adapter is None

    @property
    def source(self) -> str:
        """Who gave it: its signal or, if that is rewards, the name in place of a scorer's."""
        return self.scorer or "" if self.signal is Signal.REWARDS else self.signal.value

    # -- state -----------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether an update can take the group. Every member needs a reward; but feedback on one answer is enough if
        all answers came with one request."""
        states = {member.state for member in self.members}
        if not self.closed or TrajectoryState.SCORED not in states or TrajectoryState.TRAINING in states:
            return False
        one_is_enough = self.scorer is None and not self.named
        return one_is_enough or TrajectoryState.WAITING not in states

    @property
    def taken(self) -> bool:
        """Whether an update is using the group now."""
        return bool(self.in_state(TrajectoryState.TRAINING))

    @property
    def waiting(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.WAITING)

    @property
    def scored(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.SCORED)

    def in_state(self, state: TrajectoryState) -> tuple[GroupMember, ...]:
        return tuple(member for member in self.members if member.state is state)
