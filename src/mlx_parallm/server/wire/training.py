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
    """Training data of the client's own."""

    prompt_token_ids: SomeTokenIds
    """Not empty."""
    completion_token_ids: SomeTokenIds
    """Not empty."""
    reward: float | None = None
    """Left out for the loss cross_entropy: it is imitated whatever it is worth."""
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """Trajectories of one prompt share it; their rewards are compared."""
    sampling_logprobs: list[Logprob] | None = None
    """Nats, one for each completion token, of the distribution that drew it; left out, the trainer's own stand in."""
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=2)] = 1.0
    """At which it was drawn."""

    @model_validator(mode="after")
    def _fits_together(self) -> GivenTrajectoryBody:
        if self.sampling_logprobs is not None and len(self.sampling_logprobs) != len(self.completion_token_ids):
            raise refused("must have one entry for each completion token", "sampling_logprobs")
        return self


class UpdateBody(WireInput):
    """What to learn from, and what becomes of it."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """To learn from; left out, the complete groups that wait. Rewards are given for all of them, or for none."""
    update_inference: bool = True
    """Whether the new version goes live."""
    checkpoint_name: Name | None = None
    """The adapter is saved with this tag once the update has ended, whatever came of it; where it could not be saved
    the answer is an error."""
    lora_adapter: str | None = None
    """The adapter to train; left out, the default one."""

    @model_validator(mode="after")
    def _rewarded_alike(self) -> UpdateBody:
        if len({given.reward is None for given in self.trajectories or ()}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        return self


class ControlBody(WireInput):
    """Which adapter's training."""

    lora_adapter: str | None = None
    """The adapter; left out, the default one."""


class TrainingRollbackBody(ControlBody):
    """Where to go back to."""

    to: str | None = None
    """A checkpoint's name or tag; left out, the best version."""


class FeedbackBody(WireInput):
    """A reward."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    """As the answer named it."""
    score: float
    """The reward: any finite number."""


class Update(WireOutput):
    """What came of one update."""

    status: Literal["published", "trained", "held", "skipped"]
    """`published`: requests get it now. `trained`: not published, as asked. `held`: the gate refused it, the adapter
    is as before. `skipped`: nothing was learnt."""
    reason: str
    """Why it was held or skipped."""
    lora_adapter: str | None
    """The version it made."""
    step: int
    """Of the optimizer."""
    metrics: dict[str, float | None]
    """By name; null for no finite number."""
    checkpoint: str | None
    """Its name, where one was due; never null where `checkpoint_name` was given."""


class Training(WireOutput):
    """One trained adapter."""

    training_enabled: bool
    """Whether the server trains."""
    state: str
    """disabled, idle, running, updating or paused."""
    lora_adapter: str | None
    """The trained adapter."""
    current_lora: str | None
    """Its live version."""
    step: int
    """Optimizer steps so far."""
    trajectories_collected: int
    """Since start."""
    trajectories_waiting: int
    """For a reward."""
    groups_ready: int
    """Complete groups that wait for an update."""
    updates_total: int
    """Since start."""
    updates_per_second: float
    """Of late."""
    last_update: str | None
    """ISO-8601, UTC."""
    loss: float | None
    """The last update's, as the fields below to `staleness`; null: not known."""
    reward_mean: float | None
    """Of its trajectories."""
    reward_std: float | None
    """Standard deviation of them."""
    reward_running_mean: float | None
    """Over updates."""
    kl: float | None
    """Nats a token, to the base; from a sample of the tokens, unless the loss weighs it."""
    entropy: float | None
    """Nats a token."""
    clip_fraction: float | None
    """Of tokens, 0 to 1."""
    ratio: float | None
    """Mean of the importance ratios."""
    staleness: float | None
    """Versions between drawing and training, the mean."""
    metrics: dict[str, float | None]
    """All of the last update's, by name."""
    drops: dict[str, int]
    """Trajectories dropped, by reason."""
    skips: dict[str, int]
    """Updates skipped, by reason."""
    best_lora: str | None
    """The version with the best evaluation."""
    available_checkpoints: list[str]
    """Names, oldest first."""
    trained_adapters: list[str]
    """All that are trained here."""


class Scored(WireOutput):
    """The reward is kept."""

    status: Literal["success"]
    """Always the same."""
    trajectory_id: str
    """As it was sent."""
    score: float
    """As it was sent."""


class EventObject(WireOutput):
    """One of the stream's events."""

    kind: str
    """The event's name too."""
    at: str
    """ISO-8601, UTC."""
    data: dict[str, Any]
    """What happened."""


class DebugAdapterTraining(Training):
    """One trained adapter, from inside."""

    detail: dict[str, Any]
    """For people."""


class DebugTraining(WireOutput):
    """Training, from inside."""

    training_enabled: bool
    """Whether the server trains."""
    adapters: list[DebugAdapterTraining]
    """One for each trained adapter."""


class DebugTrajectory(WireOutput):
    """One trajectory as it was drawn."""

    trajectory_id: str
    """Its name."""
    group_id: str
    """Trajectories of one prompt share it."""
    group_size: int
    """Trajectories that the group will have."""
    lora_adapter: str
    """The version that drew it, `base@0` for the base."""
    state: str
    """waiting (for a reward), scored, training, trained or dropped."""
    reason: str
    """Why it was dropped."""
    reward: float | None
    """Null: none yet."""
    scoring_function: str | None
    """Who rewards it; null: feedback does."""
    metadata: dict[str, Any]
    """What the scorer reads."""
    prompt_token_ids: list[int]
    """As they were computed."""
    completion_token_ids: list[int]
    """As they were drawn."""
    sampling_logprobs: list[float | None]
    """Nats, of the distribution that drew the token."""
    temperature: float
    """At which it was drawn."""
    text: str
    """Of the completion."""
    finish_reason: Literal["stop", "length"]
    """Why it ended."""
    created: str
    """ISO-8601, UTC."""


class DebugTrajectories(WireOutput):
    """The newest trajectories."""

    object: Literal["list"]
    """Always the same."""
    data: list[DebugTrajectory]
    """Newest first."""
