"""Request bodies of the training routes.

A trajectory that a client sends with `POST /v1/training/update` is a prompt and a completion, or one row of tokens:

    prompt_token_ids [5, 6]   completion_token_ids [7, 2]                          one answer
    token_ids [5, 6, 7, 2, 8, 9, 3, 2]   mask [0, 0, 1, 1, 0, 0, 1, 1]             two turns, with a tool result between

The second form is the one in which prime-rl, verifiers, TRL and Atropos keep rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PlainValidator, model_validator

from mlx_parallm.core.requests import Signal
from mlx_parallm.server.api.adapters.schema import MAX_NAME, Name
from mlx_parallm.server.api.fields import INT32_MAX, NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.api.generation_fields import MAX_EPISODE_ID, MIN_COLLECTED_TEMPERATURE

User = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0, but float32 sums can be slightly above."""

Logprob = Annotated[float, Field(le=MAX_LOGPROB)]


def _mask(value: object) -> list[bool]:
    if isinstance(value, list) and all(type(one) in (int, bool) and one in (0, 1) for one in value):
        return [bool(one) for one in value]
    raise refused("must be a list of 0 and 1")


Mask = Annotated[list[bool], PlainValidator(_mask, json_schema_input_type=list[Annotated[int, Field(ge=0, le=1)]])]


def _check_logprobs(trained: Sequence[float | None]) -> None:
    """Checks the values of the field `logprobs` that belong to trained tokens."""
    if None in trained:
        raise refused("null is for context; a token that was sampled needs the log-probability of its draw", "logprobs")
    if any(value is not None and value > MAX_LOGPROB for value in trained):
        raise refused("a log-probability is at most 0; one of a sampled token is greater", "logprobs")


class GivenTrajectoryBody(WireInput):
    """A trajectory that the client sends: a prompt and a completion, each given once as token ids or as text; or
    `token_ids` with a `mask`."""

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
    token_ids: NonEmptyTokenIds | None = None
    """In place of prompt and completion: all tokens of one row, in which there may be several sampled stretches."""
    mask: Mask | None = None
    """With `token_ids`, one for each of them: 1 for tokens that were sampled and are trained, 0 for context, such as
    the prompt and the results of tools. The first is 0."""
    reward: float | None = None
    """The reward. It may be left out for the loss cross_entropy, which does not use rewards, and with `advantages`."""
    advantages: float | list[float] | None = None
    """Taken as they are, in place of those computed from rewards: one number, or one for each token of the completion
    (or of `token_ids`; those of context are not read). Either all trajectories have them or none has."""
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """The group: trajectories of one prompt, whose rewards are compared. Trajectories without a `group_id` are grouped
    by their prompts."""
    episode_id: Annotated[str, Field(max_length=MAX_EPISODE_ID)] = ""
    """Trajectories of one group with the same id are one episode, in the order in which they are sent, and count once
    in their group. One that continues the tokens of an earlier one is joined to it. The reward of the episode is given
    with one of them, or the same with each."""
    sampling_logprobs: list[Logprob] | None = None
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from. If
    they are left out, the trainer computes those of the current policy, as if it had drawn the completion."""
    logprobs: list[float | None] | None = None
    """Another name for `sampling_logprobs`. With `token_ids`, one for each of them; those of context are not read and
    may be null."""
    lora_version: str | None = None
    """The adapter version that sampled the completion, such as `math@3` or `base`. It is refused unless training
    continued from it and it is at most `max_staleness` versions old. The default: the trajectory counts as new."""
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=2)] = 1.0
    """The temperature of sampling."""

    @model_validator(mode="after")
    def _fits_together(self) -> GivenTrajectoryBody:
        if self.sampling_logprobs is not None and self.logprobs is not None:
            raise refused("is the same as sampling_logprobs; send one of them", "logprobs")
        if self.token_ids is None:
            self._check_answer()
        else:
            self._check_row(len(self.token_ids))
        return self

    def _check_answer(self) -> None:
        self._one_of("prompt_token_ids", "prompt")
        self._one_of("completion_token_ids", "tokens", "output")
        if self.mask is not None:
            raise refused("needs token_ids", "mask")
        _check_logprobs(self.logprobs or ())
        ids = self.completion_token_ids or self.tokens
        for name in ("sampling_logprobs", "logprobs", "advantages"):
            values = getattr(self, name)
            if ids is not None and isinstance(values, list) and len(values) != len(ids):
                raise refused("must have one entry for each completion token", name)

    def _check_row(self, tokens: int) -> None:
        for name in ("prompt_token_ids", "prompt", "completion_token_ids", "tokens", "output"):
            if getattr(self, name) is not None:
                raise refused("is part of token_ids already; send one of them", name)
        if self.mask is None:
            raise refused("must say with 1 which of token_ids were sampled", "mask")
        for name in ("mask", "sampling_logprobs", "logprobs", "advantages"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != tokens:
                raise refused(f"must have one entry for each of the {tokens} token_ids", name)
        if self.mask[0] or not any(self.mask):
            raise refused("must begin with 0, because nothing predicts the first token, and have a 1", "mask")
        _check_logprobs([value for value, trained in zip(self.logprobs or (), self.mask, strict=False) if trained])

    def _one_of(self, *fields: str) -> None:
        if sum(getattr(self, field) is not None for field in fields) != 1:
            raise refused(f"send one of {', '.join(fields)}", fields[0])

    @property
    def given_logprobs(self) -> list[float]:
        """`sampling_logprobs` under either name, 0 in place of null; empty if they were left out."""
        return self.sampling_logprobs or [value or 0.0 for value in self.logprobs or ()]


MAX_GIVEN = 4096
GivenTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_GIVEN)]


class UpdateBody(WireInput):
    """One update."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """The training data. If it is left out, the complete groups that were collected are used. Either all trajectories
    (or episodes) have a reward or none has."""
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
    signal: Annotated[Signal, Field(strict=False)] | None = None
    """What the update learns from, without given data: answers with `rewards`, `late_feedback`, `preferences` or
    `corrections`. The default: rewards or, if no answer with one waits, the first of the others that do."""

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
        if self.signal is not None and (given or self.trajectories is not None):
            raise refused("is for what waits; leave it out with given data", "signal")
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
    def _given_alike(self) -> UpdateBody:
        alone = [given for given in self.trajectories or () if not given.episode_id]
        if len({given.reward is None for given in alone}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        if len({given.advantages is None for given in self.trajectories or ()}) > 1:
            raise refused("give advantages with each of them, or with none", "trajectories")
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
    user: User | None = None
    """With `trajectory_id` and `score`: whose opinion this is. The last one of each user counts, and the reward is the
    mean over users. All that is sent without a `user` is the opinion of one."""

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
        if self.user is not None and (self.trajectory_id is None or self.score is None):
            raise refused("needs trajectory_id and score", "user")
        return self
