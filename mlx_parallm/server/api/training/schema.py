"""Request and response bodies of the training routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_parallm.server.api.adapters.schema import MAX_NAME, Name
from mlx_parallm.server.api.fields import NonEmptyTokenIds, WireInput, WireOutput, refused
from mlx_parallm.server.api.generation_fields import MIN_COLLECTED_TEMPERATURE

MAX_GIVEN = 4096
MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0, but float32 sums can be slightly above."""

Logprob = Annotated[float, Field(le=MAX_LOGPROB)]
GivenTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_GIVEN)]


class GivenTrajectoryBody(WireInput):
    """A trajectory that the client brings. Its prompt and its completion are token ids or text, each given once."""

    prompt_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the prompt, at least one."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The prompt as text. The served tokenizer encodes it once, as a prompt of `/v1/completions`."""
    completion_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the completion, at least one."""
    tokens: NonEmptyTokenIds | None = None
    """Another name of `completion_token_ids`."""
    output: Annotated[str, Field(min_length=1)] | None = None
    """The completion as text. The served tokenizer encodes it once and adds no special token, so an answer that ended
    by itself has no end-of-sequence token. The tokens may differ from those that were drawn; `tokens` are exact."""
    reward: float | None = None
    """May be left out for the loss cross_entropy, which does not use rewards."""
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """Trajectories of one prompt have the same one; their rewards are compared."""
    sampling_logprobs: list[Logprob] | None = None
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from. Left
    out, the trainer computes those of the current policy, as if it had drawn the completion."""
    logprobs: list[Logprob] | None = None
    """Another name of `sampling_logprobs`."""
    lora_version: str | None = None
    """The adapter version that drew the completion: a selector. Versions that training does not continue from, or older
    than `max_staleness`, are refused. Left out, the trajectory counts as new."""
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
    """The training data; left out, the complete groups that were collected. All have a reward, or none has."""
    prompts: GivenTexts | None = None
    """The training data as three lists of the same length, in place of `trajectories`: prompts as text, one completion
    for each in `outputs`, and its reward in `rewards`. Equal prompts are one group."""
    outputs: GivenTexts | None = None
    """One completion for each of `prompts`, as text."""
    rewards: Annotated[list[float], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """One reward for each of `prompts`."""
    update_inference: bool = True
    """Whether the new version is published."""
    checkpoint_name: Name | None = None
    """A tag: the adapter is saved with it after the update, even if that was held or skipped. If it cannot be saved,
    the answer is an error."""
    lora_adapter: str | None = None
    """The adapter to train; left out, the default one."""

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
    """The adapter; left out, the default one."""


class TrainingRollbackBody(ControlBody):
    """The version to go back to."""

    to: str | None = None
    """A checkpoint's name or tag; left out, the best version."""


class FeedbackBody(WireInput):
    """The reward of a trajectory."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    """The id, from the response of the request that was collected."""
    score: float
    """The reward: any finite number."""


class UpdateObject(WireOutput):
    """The result of one update."""

    status: Literal["published", "trained", "held", "skipped"]
    """`published`: the new version is live. `trained`: it is not published, as requested. `held`: the gate refused it,
    and the adapter is unchanged. `skipped`: there was nothing to learn."""
    reason: str
    """Why it was held or skipped."""
    lora_adapter: str | None
    """The new version."""
    step: int
    """Optimizer steps so far."""
    metrics: dict[str, float | None]
    """Figures of the update by name; null if not finite."""
    checkpoint: str | None
    """Name of the checkpoint, if one was saved; never null if `checkpoint_name` was given."""


class TrainingObject(WireOutput):
    """The training of one adapter."""

    training_enabled: bool
    """Whether the server trains."""
    state: str
    """disabled, idle, running, updating or paused."""
    lora_adapter: str | None
    """The trained adapter."""
    live_lora: str | None
    """Its live version."""
    current_lora: str | None
    """What requests that name no adapter get now: the version with the largest share of the route, whatever its
    adapter; null if it is the base model."""
    step: int
    """Optimizer steps so far."""
    trajectories_collected: int
    """Trajectories collected since start."""
    trajectories_waiting: int
    """Trajectories that wait for a reward."""
    groups_ready: int
    """Complete groups that wait for an update."""
    updates_total: int
    """Updates since start."""
    updates_per_second: float
    """Recent rate of updates."""
    last_update: str | None
    """Time of the last update, in ISO-8601, UTC."""
    loss: float | None
    """Loss of the last update. This and the fields down to `staleness` are null if not known."""
    reward_mean: float | None
    """Mean reward of the last update."""
    reward_std: float | None
    """Standard deviation of the rewards of the last update."""
    reward_running_mean: float | None
    """Running mean of the rewards over updates."""
    kl: float | None
    """KL divergence from the base model in nats a token; estimated from a sample of the tokens, unless it is part of
    the loss."""
    entropy: float | None
    """Entropy in nats a token."""
    clip_fraction: float | None
    """Share of tokens that were clipped, 0 to 1."""
    ratio: float | None
    """Mean importance ratio."""
    staleness: float | None
    """Mean number of versions between sampling and training."""
    metrics: dict[str, float | None]
    """All figures of the last update, by name."""
    drops: dict[str, int]
    """Trajectories dropped, by reason."""
    skips: dict[str, int]
    """Updates skipped, by reason."""
    best_lora: str | None
    """The version with the best evaluation."""
    available_checkpoints: list[str]
    """Names of its checkpoints, oldest first, each followed by its tags."""
    trained_adapters: list[str]
    """All adapters that this server trains."""


class FeedbackObject(WireOutput):
    """The reward that was set."""

    status: Literal["success"]
    trajectory_id: str
    """The trajectory."""
    score: float
    """Its reward."""


class EventObject(WireOutput):
    """One event of the stream."""

    kind: str
    """The kind of event; also its name in the stream."""
    at: str
    """Time in ISO-8601, UTC."""
    data: dict[str, Any]
    """Details, by kind."""


class DebugAdapterTraining(TrainingObject):
    """The training of one adapter, with details."""

    detail: dict[str, Any]
    """The trainer's state, for people."""


class DebugTraining(WireOutput):
    """The training of all adapters, with details."""

    training_enabled: bool
    """Whether the server trains."""
    adapters: list[DebugAdapterTraining]
    """One for each trained adapter."""


class DebugTrajectory(WireOutput):
    """One trajectory."""

    trajectory_id: str
    """Its id."""
    group_id: str
    """Id of its group: the trajectories of one prompt."""
    group_size: int
    """Number of trajectories that the group will have."""
    lora_adapter: str
    """The adapter version that it was sampled from; `base@0` for the base model."""
    state: str
    """waiting (for a reward), scored, training, trained or dropped."""
    reason: str
    """Why it was dropped; else empty."""
    reward: float | None
    """Its reward; null: none yet."""
    scoring_function: str | None
    """The scorer that rewards it; null: feedback does."""
    metadata: dict[str, Any]
    """Data for the scorer."""
    prompt_token_ids: list[int]
    """Token ids of the prompt."""
    completion_token_ids: list[int]
    """Token ids of the completion, as sampled."""
    sampling_logprobs: list[float | None]
    """Log-probabilities in nats, of the distribution that each token was sampled from."""
    temperature: float
    """The temperature of sampling."""
    text: str
    """Text of the completion."""
    finish_reason: Literal["stop", "length"]
    """Why the completion ended."""
    created: str
    """Time in ISO-8601, UTC."""


class DebugTrajectories(WireOutput):
    """The newest trajectories."""

    object: Literal["list"]
    data: list[DebugTrajectory]
    """Newest first."""
