"""`/v1/training/schedule`: how requests and training share the device, and the shares that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, cast

from fastapi import Depends
from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.core.device import MODE_SHARES, DeviceSchedule
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import WireInput, WireOutput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep, TrainingDep

Mode = Literal["inference_and_training", "training_priority"]
ModeName = Literal["inference_and_training", "training_priority", "custom"]

NOT_AT_RUN_TIME = {
    "inference_only": "is not available at run time; POST /v1/training/pause stops updates",
    "training_only": "is not available at run time; POST /sleep refuses requests",
}
MIN_STALL_MS, MAX_STALL_MS = 1, 60_000

router = Router()


def _mode(value: object) -> object:
    if isinstance(value, str) and value in NOT_AT_RUN_TIME:
        raise refused(NOT_AT_RUN_TIME[value])
    return value


class PriorityRatiosBody(WireInput):
    """Shares of the batch's rows while live requests and rollouts both want rows; they add up to 1."""

    inference: Annotated[float, Field(ge=0, le=1)]
    """Share of live requests, 0 to 1."""
    training: Annotated[float, Field(ge=0, le=1)]
    """Share of rollouts, 0 to 1."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> PriorityRatiosBody:
        if abs(self.inference + self.training - 1) > 1e-6:
            raise refused(f"inference + training must be 1, not {self.inference + self.training:g}")
        return self


class ScheduleBody(WireInput):
    """The changes; at least one field must be given, and fields that are left out keep their values."""

    mode: Annotated[Mode, BeforeValidator(_mode)] | None = None
    """A name for a `training_time_share`: inference_and_training means 0.12, training_priority means 0.5.
    `training_time_share` overrides it."""
    training_time_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of device time for updates while requests run, above 0, at most 1. Updates also get all idle time."""
    max_decode_stall_ms: Annotated[float, Field(ge=MIN_STALL_MS, le=MAX_STALL_MS)] | None = None
    """Longest time for other work between two tokens, in milliseconds. How much work fits this time is predicted, and
    work is not interrupted, so a token can take longer."""
    priority_ratios: PriorityRatiosBody | None = None
    """Shares of the batch's rows."""

    @model_validator(mode="after")
    def _not_empty(self) -> ScheduleBody:
        if not self.model_fields_set:
            raise refused(f"send at least one of {', '.join(ScheduleBody.model_fields)}")
        return self


class PriorityRatiosObject(WireOutput):
    """Shares of the batch's rows while live requests and rollouts both want rows."""

    inference: float
    """Share of live requests, 0 to 1."""
    training: float
    """Share of rollouts, 0 to 1."""


class MeasuredShares(WireOutput):
    """The measured effect of the schedule."""

    training_share: float
    """Share of device time that training got in the last window, 0 to 1."""
    largest_decode_gap_ms: float
    """Longest time between two decode steps since start, in milliseconds; 0 before the first."""


class ScheduleObject(WireOutput):
    """The schedule in force. A change takes effect with the next unit of device work."""

    mode: ModeName
    """The mode that has this `training_time_share`; `custom` if none has it."""
    training_time_share: float
    """Share of device time for updates while requests run, 0 to 1."""
    max_decode_stall_ms: float
    """Longest time for other work between two tokens, in milliseconds. How much work fits this time is predicted, and
    work is not interrupted, so a token can take longer."""
    priority_ratios: PriorityRatiosObject
    """Shares of the batch's rows."""
    measured: MeasuredShares
    """The measured effect."""


@router.get("/v1/training/schedule", role=Role.TRAIN)
async def get_schedule(services: ServicesDep, _: TrainingDep) -> ScheduleObject:
    """How requests and training share the device now."""
    return schedule_object(services.engine.stats())


@router.post(
    "/v1/training/schedule",
    role=Role.ADMIN,
    audited=True,
    examples={"training first": {"mode": "training_priority", "max_decode_stall_ms": 250}},
)
async def set_schedule(
    body: Annotated[ScheduleBody, Depends(json_body(ScheduleBody))], services: ServicesDep, _: TrainingDep
) -> ScheduleObject:
    """Changes the schedule from the next unit of device work on. A restart restores the configured schedule."""
    await services.lifecycle.run_to_end(_change(body, services))
    return schedule_object(services.engine.stats())


async def _change(body: ScheduleBody, services: Services) -> None:
    async with services.schedule_lock:
        await services.engine.reschedule(_changed(services.engine.stats().schedule, body))


def _changed(schedule: DeviceSchedule, body: ScheduleBody) -> DeviceSchedule:
    if body.mode is not None:
        schedule = replace(schedule, training_time_share=MODE_SHARES[body.mode])
    if body.training_time_share is not None:
        schedule = replace(schedule, training_time_share=body.training_time_share)
    if body.max_decode_stall_ms is not None:
        schedule = replace(schedule, max_decode_stall_s=body.max_decode_stall_ms / 1000)
    if (ratios := body.priority_ratios) is not None:
        shares = {WorkClass.INFERENCE: ratios.inference, WorkClass.TRAINING: ratios.training}
        schedule = replace(schedule, row_shares=shares)
    return schedule


def schedule_object(stats: EngineStats) -> ScheduleObject:
    schedule = stats.schedule
    return ScheduleObject(
        mode=mode_of(schedule),
        training_time_share=schedule.training_time_share,
        max_decode_stall_ms=_milliseconds(schedule.max_decode_stall_s),
        priority_ratios=PriorityRatiosObject(
            inference=schedule.row_shares[WorkClass.INFERENCE], training=schedule.row_shares[WorkClass.TRAINING]
        ),
        measured=MeasuredShares(
            training_share=stats.training_share, largest_decode_gap_ms=_milliseconds(stats.decode_gaps.largest)
        ),
    )


def mode_of(schedule: DeviceSchedule) -> ModeName:
    """The mode that has this share of device time; `custom` if none has it."""
    modes = (mode for mode, share in MODE_SHARES.items() if share == schedule.training_time_share)
    return cast(ModeName, next(modes, "custom"))


def _milliseconds(seconds: float) -> float:
    """Rounded to the nanosecond, so that 1001 ms are reported as 1001."""
    return round(seconds * 1000, 6)
