"""How device time is shared: what may be changed of it while the server runs, and what is told of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.server.wire.base import WireInput, WireOutput, refused

Mode = Literal["inference_and_training", "training_priority"]
ModeName = Literal["inference_and_training", "training_priority", "custom"]

ELSEWHERE = {
    "inference_only": "no mode of a running server; POST /v1/training/pause stops updates",
    "training_only": "no mode of a running server; POST /sleep keeps requests away",
}
MIN_STALL_MS, MAX_STALL_MS = 1, 60_000


def _mode(value: object) -> object:
    if isinstance(value, str) and value in ELSEWHERE:
        raise refused(ELSEWHERE[value])
    return value


class PriorityRatiosBody(WireInput):
    """Shares of the batch's rows, of live requests and of rollouts, while both want them; they add up to 1."""

    inference: Annotated[float, Field(ge=0, le=1)]
    """Of live requests, 0 to 1."""
    training: Annotated[float, Field(ge=0, le=1)]
    """Of rollouts, 0 to 1."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> PriorityRatiosBody:
        if abs(self.inference + self.training - 1) > 1e-6:
            raise refused(f"inference + training must be 1, not {self.inference + self.training:g}")
        return self


class ScheduleBody(WireInput):
    """What is left out stays as it is; something must be given."""

    mode: Annotated[Mode, BeforeValidator(_mode)] | None = None
    """A name for a share: inference_and_training 0.12, training_priority 0.5; a share given beside it wins."""
    training_time_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of device time, for updates beside requests; of idle time they get all."""
    max_decode_stall_ms: Annotated[float, Field(ge=MIN_STALL_MS, le=MAX_STALL_MS)] | None = None
    """Milliseconds of other work put between two tokens. It is sized by prediction and not interrupted, so a token can
    wait longer."""
    priority_ratios: PriorityRatiosBody | None = None
    """Of the batch's rows."""

    @model_validator(mode="after")
    def _something(self) -> ScheduleBody:
        if not self.model_fields_set:
            raise refused(f"send at least one of {', '.join(ScheduleBody.model_fields)}")
        return self


class PriorityRatios(WireOutput):
    """Shares of the batch's rows while both classes want them."""

    inference: float
    """Of live requests, 0 to 1."""
    training: float
    """Of rollouts, 0 to 1."""


class Measured(WireOutput):
    """What came of the schedule."""

    training_share: float
    """Of device time, 0 to 1, in the last window."""
    largest_decode_gap_ms: float
    """Milliseconds between two decode steps, the most since start; 0 before any."""


class Schedule(WireOutput):
    """In force from the next unit of device work on."""

    mode: ModeName
    """The one that `training_time_share` belongs to; custom where none has it."""
    training_time_share: float
    """Of device time, for updates beside requests, 0 to 1."""
    max_decode_stall_ms: float
    """Milliseconds of other work put between two tokens. It is sized by prediction and not interrupted, so a token can
    wait longer."""
    priority_ratios: PriorityRatios
    """Of the batch's rows."""
    measured: Measured
    """What came of it."""
