"""Trajectories as the event loop sees them: collected or given, rewarded, and the protocol that takes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import CollectionSpec, Event, FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sequence with the token ids as they were sampled. It is never tokenised again.

    Attributes:
        group_size: the number of trajectories that its group will have; 0 if that is not known.
        adapter: the version that sampled the tokens; None if it is unknown, because they were sampled elsewhere.
        completion_ids: includes the end-of-sequence token if that ended the sequence; `text` does not.
        sampling_logprobs: one for each of `completion_ids`, fp32 nats, of the distribution that it was sampled from:
            that of the model with `adapter` at `temperature`, without filters and penalties. Empty if they are unknown.
        finish_reason: None if it is unknown.
        created: Unix time in seconds.
        mask, advantages, reference_logprobs: as in `GivenTrajectory`.
        owner: the name of the API key that sent it or its request. Empty: the server has sampled it for a task of its
            own. None: that is not known.
    """

    trajectory_id: str
    group_id: str
    group_size: int
    adapter: AdapterRef | None
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    temperature: float
    text: str
    finish_reason: FinishReason | None
    collection: CollectionSpec
    created: float
    mask: tuple[bool, ...] = ()
    advantages: tuple[float, ...] = ()
    reference_logprobs: tuple[float, ...] = ()
    owner: str | None = None

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained."""
        return sum(self.mask) if self.mask else len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class GroupCard:
    """A group that requests have named."""

    __pydantic_config__ = ANSWER

    group_id: str
    """Its id."""
    adapter: str
    """The adapter that it trains."""
    members: int
    """Answers or episodes in it."""
    rewarded: int
    """Those that have a reward."""
    complete: bool
    """Whether an update can take it now. A group with a `scoring_function` is complete when its members are scored."""


@dataclass(frozen=True, slots=True)
class GivenTrajectory:
    """One trajectory that a client sends as training data, as ids of the model's tokenizer.

    Attributes:
        reward: may be None for the loss `cross_entropy`, which imitates the completion, and with `advantages`; all else
            needs it.
        group_id: shared by the trajectories of one prompt, whose rewards are compared.
        sampling_logprobs: one for each token of the completion; empty if unknown. The trainer's own logprobs are used
            then, as if the current version had sampled the completion.
        adapter: the version that sampled the completion; None if unknown.
        mask: for each token of the completion, whether it is trained. The others, such as the results of tools, are
            context, and their logprobs and advantages are not read. Empty: all are trained.
        advantages: one for each token of the completion, in place of those computed from rewards; empty: none given.
        reference_logprobs: one for each token of the completion, in place of those of the base model; empty: none
            given.
        episode_id: trajectories of one group with the same id are one episode; empty: it is an episode by itself.
        owner: as in `Trajectory`.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    reward: float | None = None
    group_id: str = ""
    sampling_logprobs: tuple[float, ...] = ()
    temperature: float = 1.0
    adapter: AdapterRef | None = None
    mask: tuple[bool, ...] = ()
    advantages: tuple[float, ...] = ()
    reference_logprobs: tuple[float, ...] = ()
    episode_id: str = ""
    owner: str | None = None

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained."""
        return sum(self.mask) if self.mask else len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class FeedbackCard:
    """What became of a score. `reward`: the mean of the last scores of all `people`. `late`: the answer had been
    dropped, and is learnt from as late feedback."""

    reward: float
    people: int
    late: bool = False


class CollectingClient(Protocol):
    """Collects the answers to requests, and takes their rewards: for the training of this server, or on a node of a
    cluster for its trainer."""

    async def check(
        self, collection: CollectionSpec, adapter: AdapterRef, reader: Reader, prompt: str | None = None
    ) -> CollectionSpec:
        """Checks before generation whether a request may be collected. This may wait for a child process. `reader`: the
        API key that sends it. Groups of different keys are different ones, even if their ids are equal.

        If its scorer reads an answer and `metadata` has none, the answer is that of the server's task with the id
        `metadata.problem_id`, or with the text `prompt`.

        Returns:
            The collection, with that answer; without a scorer, to wait for feedback, if there is no such task.

        Raises:
            OverloadedError: too many other requests are being checked.
            InvalidRequestError: the scorer is unknown, `metadata` lacks what it reads, or the group that the request
                names has another size or scorer.
            ConflictError: the group is closed; or what the answers would train is not trained here, or not seen by the
                reader.
        """

    def collect(self, request: GenerationRequest, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """Passes the events of a request with `collection` through, and collects its trajectories when it finishes.

        RequestFinished gets the ids of the trajectories, and a warning if they will not be trained on. A request that
        samples no token (max_tokens 0) leaves no trajectory. Closing the result closes `events`.
        """

    async def feedback(self, trajectory_id: str, score: float, user: str, reader: Reader) -> FeedbackCard:
        """Adds a person's opinion of an answer, and returns when it is on the disk. The last one of each `user` counts;
        the reward is the mean over users. One rewarded answer is enough to train on the group of one request. For a
        turn of an episode, it is the reward of that turn, which adds to the episode's.

        If the answer was dropped because it was too old or nobody had judged it, it is learnt from as late feedback.
        Then scores above 0 are for it, and all others against it.

        Raises:
            StorageError: it could not be written, and does not count.
            QueueFullError: it is late, and too many answers wait.
            UnknownTrajectoryError: the trajectory does not exist, or the reader may not judge it.
            ConflictError: it was trained on, or its update was refused; or as many people have judged it as may.
        """

    async def reward_tokens(self, trajectory_id: str, rewards: Sequence[float], reader: Reader) -> None:
        """Sets one reward for each token of an answer or turn. Each is credited to its token and those before it.

        Raises:
            InvalidRequestError: there is not one for each token.
            Also the errors of `feedback`.
        """

    async def reward_episode(self, episode_id: str, group_id: str, score: float, reader: Reader) -> None:
        """Sets the reward of an episode as a whole, which ends it. `group_id`: empty if its requests named no group.

        Raises:
            UnknownTrajectoryError: no turn of it was collected that the reader may reward.
            ConflictError: it was trained on, or dropped; or several keys have such an episode, and none is the
                reader's.
            StorageError: the reward could not be written, and does not count.
        """

    async def close_group(self, group_id: str, reader: Reader) -> GroupCard:
        """Lets no more members into a group that requests have named. If it has a scorer, the scorer rewards the
        members without a reward; otherwise they are dropped, except episodes whose turns or tokens have rewards.

        Raises:
            UnknownTrajectoryError: the reader has no such group.
            ConflictError: it was trained on, or dropped; or several keys have such a group, and none is the reader's.
            StorageError: this could not be written, and the group stays open.
        """
