"""Request bodies of the training routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from mlx_parallm.server.api.adapters.schema import MAX_NAME, Name
from mlx_parallm.server.api.fields import INT32_MAX, NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.api.generation_fields import MAX_EPISODE_ID, MIN_COLLECTED_TEMPERATURE

MAX_GIVEN = 4096
MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0, but float32 sums can be slightly above."""

Logprob = Annotated[float, Field(le=MAX_LOGPROB)]
GivenTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_GIVEN)]


class GivenTrajectoryBody(WireInput):
    """A trajectory that the client sends. The prompt and the completion are each given once, as token ids or as
    text."""

    prompt_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the prompt, at least one."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The prompt as text. It is encoded like a prompt of `/v1/completions`."""
    completion_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the completion, at least one."""
    tokens: NonEmptyTokenIds | None = None
    """Another name for `completion_token_ids`."""
    output: Annotated[str, Field(min_length=1)] | None = None
    """The completion as text. It is encoded without special tokens, so an answer that the model ended lacks the
    end-of-sequence token. The tokens may differ from those that were sampled; `tokens` are exact."""
    reward: float | None = None
    """The reward. It may be left out for the loss cross_entropy, which does not use rewards."""
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """The group: trajectories of one prompt, whose rewards are compared. Trajectories without a `group_id` are grouped
    by their prompts."""
    sampling_logprobs: list[Logprob] | None = None
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from. If
    they are left out, the trainer computes those of the current policy, as if it had drawn the completion."""
    logprobs: list[Logprob] | None = None
    """Another name for `sampling_logprobs`."""
    lora_version: str | None = None
    """The adapter version that sampled the completion, such as `math@3` or `base`. It is refused unless training
    continued from it and it is at most `max_staleness` versions old. The default: the trajectory counts as new."""
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=2)] = 1.0
    """The temperature of sampling."""

    @model_validator(mode="after")
    def _fits_together(self) -> GivenTrajectoryBody:
        self._one_of("prompt_token_ids", "prompt")
        self._one_of("completion_token_ids", "tokens", "output")
        if self.sampling_logprobs is not None and self.logprobs is not None:
            raise refused("is the same as sampling_logprobs; send one of them", "logprobs")
        ids = self.completion_token_ids or self.tokens
        for name in ("sampling_logprobs", "logprobs"):
            logprobs = getattr(self, name)
            if ids is not None and logprobs is not None and len(logprobs) != len(ids):
                raise refused("must have one entry for each completion token", name)
        return self

    def _one_of(self, *fields: str) -> None:
        if sum(getattr(self, field) is not None for field in fields) != 1:
            raise refused(f"send one of {', '.join(fields)}", fields[0])

    @property
    def given_logprobs(self) -> list[float]:
        """`sampling_logprobs` under either name; empty if they were left out."""
        return self.sampling_logprobs or self.logprobs or []


class UpdateBody(WireInput):
    """One update."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """The training data. If it is left out, the complete groups that were collected are used. Either all trajectories
    have a reward or none has."""
    prompts: GivenTexts | None = None
    """The training data as three lists of the same length, in place of `trajectories`: prompts as text, one completion
    for each in `outputs`, and its reward in `rewards`. Equal prompts are one group."""
    outputs: GivenTexts | None = None
    """One completion for each of `prompts`, as text."""
    rewards: Annotated[list[float], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """One reward for each of `prompts`."""
    update_inference: bool = True
    """Whether the new version becomes live."""
    checkpoint_name: Name | None = None
    """A tag. After the update, even if it was held or skipped, the adapter is saved as a checkpoint with this tag. If
    it cannot be saved, the answer is an error."""
    lora_adapter: str | None = None
    """The adapter to train. By default, the default adapter."""

    @property
    def given(self) -> list[GivenTrajectoryBody] | None:
        """The training data in either form."""
        if self.prompts is None or self.outputs is None:
            return self.trajectories
        rewards: Sequence[float | None] = self.rewards or [None] * len(self.prompts)
        return [
            GivenTrajectoryBody(prompt=prompt, output=output, reward=reward)
            for prompt, output, reward in zip(self.prompts, self.outputs, rewards, strict=True)
        ]

    @model_validator(mode="after")
    def _lists_of_one_length(self) -> UpdateBody:
        lists = {"prompts": self.prompts, "outputs": self.outputs, "rewards": self.rewards}
        given = {name: values for name, values in lists.items() if values is not None}
        if not given:
            return self
        if self.trajectories is not None:
            raise refused("send trajectories, or the three lists", next(iter(given)))
        if "prompts" not in given or "outputs" not in given:
            raise refused("prompts and outputs need each other", next(iter(given)))
        if len({len(values) for values in given.values()}) > 1:
            raise refused("prompts, outputs and rewards must have the same length", "outputs")
        return self

    @model_validator(mode="after")
    def _rewarded_alike(self) -> UpdateBody:
        if len({given.reward is None for given in self.trajectories or ()}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        return self


class ControlBody(WireInput):
    """The adapter to control."""

    lora_adapter: str | None = None
    """The adapter. By default, the default adapter."""


class TrainingRollbackBody(ControlBody):
    """The version to go back to."""

    to: str | None = None
    """A checkpoint's name or tag. By default, the best version."""


class FeedbackBody(WireInput):
    """The reward of an answer, of an episode, of one turn of it, or of the tokens of one answer or turn."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The id of an answer, from the response of the request that was collected. If the answer is a turn of an episode,
    its reward adds to that of the episode."""
    episode_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """An episode, in place of `trajectory_id`. Its reward ends it."""
    group_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """The group of `episode_id`, if its requests named one."""
    score: float | None = None
    """The reward: any finite number."""
    token_rewards: Annotated[list[float], Field(min_length=1, max_length=INT32_MAX)] | None = None
    """In place of `score`, with `trajectory_id`: one reward for each token of the answer. Each counts for its token and
    for those before it."""

    @model_validator(mode="after")
    def _names_one(self) -> FeedbackBody:
        if (self.trajectory_id is None) == (self.episode_id is None):
            raise refused("send this or episode_id, and not both", "trajectory_id")
        if (self.score is None) == (self.token_rewards is None):
            raise refused("send this or token_rewards, and not both", "score")
        if self.group_id is not None and self.episode_id is None:
            raise refused("needs episode_id", "group_id")
        if self.token_rewards is not None and self.trajectory_id is None:
            raise refused("needs trajectory_id", "token_rewards")
        return self
