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
    training: Annotated[float, Field(ge=0, le=1)]

    @model_validator(mode="after")
    def _sum_to_one(self) -> PriorityRatiosBody:
        if abs(self.inference + self.training - 1) > 1e-6:
            raise refused(f"inference + training must be 1, not {self.inference + self.training:g}")
        return self


class ScheduleBody(WireInput):
    """What is left out stays as it is; something must be given.

    `training_time_share`: of device time, for updates beside requests; of idle time they get all. `mode` is a name for
    one: inference_and_training 0.12, training_priority 0.5; a share given beside it wins. `max_decode_stall_ms`:
    milliseconds that a token may wait for other work.
    """

    mode: Annotated[Mode, BeforeValidator(_mode)] | None = None
    training_time_share: Annotated[float, Field(gt=0, le=1)] | None = None
    max_decode_stall_ms: Annotated[float, Field(ge=MIN_STALL_MS, le=MAX_STALL_MS)] | None = None
    priority_ratios: PriorityRatiosBody | None = None

    @model_validator(mode="after")
    def _something(self) -> ScheduleBody:
        if not self.model_fields_set:
            raise refused(f"send at least one of {', '.join(ScheduleBody.model_fields)}")
        return self


class PriorityRatios(WireOutput):
    inference: float
    training: float


class Measured(WireOutput):
    """`training_share`: of device time, 0 to 1, in the last window. `largest_decode_gap_ms`: milliseconds between two
    decode steps, the most since start; 0 before any."""

    training_share: float
    largest_decode_gap_ms: float


class Schedule(WireOutput):
    """In force from the next unit of device work on. `mode`: the one that `training_time_share` belongs to, custom
    where none has it. `max_decode_stall_ms`: milliseconds that a token may wait for other work."""

    mode: ModeName
    training_time_share: float
    max_decode_stall_ms: float
    priority_ratios: PriorityRatios
    measured: Measured
