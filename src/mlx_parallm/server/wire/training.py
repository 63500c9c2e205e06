"""Training: updates, feedback, control, and what is told of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_parallm.server.wire.adapters import MAX_NAME, Name
from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.common import MIN_COLLECTED_TEMPERATURE
from mlx_parallm.server.wire.fields import SomeTokenIds

MAX_GIVEN = 4096
MAX_LOGPROB = 1e-3
"""A logprob is at most 0; float32 sums are a little off."""

Logprob = Annotated[float, Field(le=MAX_LOGPROB)]


class GivenTrajectoryBody(WireInput):
    """Training data of the client's own. `sampling_logprobs`, one for each completion token, are of the distribution
    that drew it, at `temperature`; left out, the trainer's own stand in."""

    prompt_token_ids: SomeTokenIds
    completion_token_ids: SomeTokenIds
    reward: float | None = None
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    sampling_logprobs: list[Logprob] | None = None
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=2)] = 1.0

    @model_validator(mode="after")
    def _fits_together(self) -> GivenTrajectoryBody:
        if self.sampling_logprobs is not None and len(self.sampling_logprobs) != len(self.completion_token_ids):
            raise refused("must have one entry for each completion token", "sampling_logprobs")
        return self


class UpdateBody(WireInput):
    """Without `trajectories`, the complete groups that wait. Rewards are given for all of them, or for none (a loss
    that reads none). `checkpoint_name` becomes a tag."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    update_inference: bool = True
    checkpoint_name: Name | None = None
    lora_adapter: str | None = None

    @model_validator(mode="after")
    def _rewarded_alike(self) -> UpdateBody:
        if len({given.reward is None for given in self.trajectories or ()}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        return self


class ControlBody(WireInput):
    """Without a name, the default adapter."""

    lora_adapter: str | None = None


class TrainingRollbackBody(ControlBody):
    """`to`: a checkpoint's name or tag; left out, the best version."""

    to: str | None = None


class FeedbackBody(WireInput):
    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    score: float


class Update(WireOutput):
    """`published`: requests get it now. `trained`: not published, as asked. `held`: the gate refused it, the adapter is
    as before. `skipped`: nothing was learnt. `step`: of the optimizer. A metric that is no finite number is null."""

    status: Literal["published", "trained", "held", "skipped"]
    reason: str
    lora_adapter: str | None
    step: int
    metrics: dict[str, float | None]
    checkpoint: str | None


class Training(WireOutput):
    """One trained adapter. `current_lora`: its live version. `loss` to `staleness` and `metrics` are the last update's;
    null, or absent from `metrics`: not known. `last_update`: ISO-8601, UTC. `drops`, `skips`: counts by reason."""

    training_enabled: bool
    state: str
    lora_adapter: str | None
    current_lora: str | None
    step: int
    trajectories_collected: int
    trajectories_waiting: int
    groups_ready: int
    updates_total: int
    updates_per_second: float
    last_update: str | None
    loss: float | None
    reward_mean: float | None
    reward_std: float | None
    reward_running_mean: float | None
    kl: float | None
    entropy: float | None
    clip_fraction: float | None
    ratio: float | None
    staleness: float | None
    metrics: dict[str, float | None]
    drops: dict[str, int]
    skips: dict[str, int]
    best_lora: str | None
    available_checkpoints: list[str]
    trained_adapters: list[str]


class Scored(WireOutput):
    status: Literal["success"]
    trajectory_id: str
    score: float


class EventObject(WireOutput):
    """One of the stream's events; `kind` is its name too. `at`: ISO-8601, UTC."""

    kind: str
    at: str
    data: dict[str, Any]


class DebugAdapterTraining(Training):
    detail: dict[str, Any]


class DebugTraining(WireOutput):
    training_enabled: bool
    adapters: list[DebugAdapterTraining]


class DebugTrajectory(WireOutput):
    """As it was drawn. `lora_adapter`: the version that drew it, `base@0` for the base. `state`: waiting (for a
    reward), scored, training, trained or dropped; `reason`: why dropped."""

    trajectory_id: str
    group_id: str
    group_size: int
    lora_adapter: str
    state: str
    reason: str
    reward: float | None
    scoring_function: str | None
    metadata: dict[str, Any]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    sampling_logprobs: list[float | None]
    temperature: float
    text: str
    finish_reason: Literal["stop", "length"]
    created: str


class DebugTrajectories(WireOutput):
    object: Literal["list"]
    data: list[DebugTrajectory]
