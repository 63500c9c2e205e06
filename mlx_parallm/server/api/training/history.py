"""`/v1/training/history`: what has happened in the training of an adapter since the run began."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import Query
from pydantic import Field

from mlx_parallm.rl.status import TrainingEvent, TrainingHistory
from mlx_parallm.server.access.roles import Role
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.training.objects import EventObject, event_object
from mlx_parallm.server.request import adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep, TrainingDep

MAX_EVENTS, MAX_METRICS, MAX_NAME = 2000, 64, 128

router = Router()

Metrics = Annotated[
    list[Annotated[str, Field(max_length=MAX_NAME)]] | None,
    Query(max_length=MAX_METRICS, description="A metric that is wanted; may be repeated. Default: all metrics."),
]


class HistoryObject(WireOutput):
    """The course of one adapter's training since the run began."""

    object: Literal["list"]
    lora_adapter: str
    """The adapter."""
    data: list[EventObject]
    """Its updates, evaluations, rollbacks, checkpoints, divergences, pauses, comparisons and lessons, oldest first. Of
    the time before the server was started again there are only updates and evaluations."""
    truncated: bool
    """Whether there are older ones."""
    last_event_id: str
    """With it as `Last-Event-ID`, `/v1/training/events` begins right after this answer."""


@router.get("/v1/training/history", role=Role.TRAIN)
async def history(
    services: ServicesDep,
    training: TrainingDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS, description="Maximum number of events.")] = 500,
    metric: Metrics = None,
) -> HistoryObject:
    """What has happened in the training of an adapter since the run began, as the events that reported it. The stream
    of events continues from there."""
    with adapter_named_by("lora_adapter", lora_adapter):
        return history_object(training.history(lora_adapter, limit, reader=services.key.reader), metric)


def history_object(history: TrainingHistory, metrics: Collection[str] | None) -> HistoryObject:
    """Makes the response object of a history. `metrics`: the only ones that are kept; None keeps all."""
    return HistoryObject(
        object="list",
        lora_adapter=history.adapter,
        data=[event_object(_with_metrics(event, metrics)) for event in history.events],
        truncated=history.truncated,
        last_event_id=history.last_event_id,
    )


def _with_metrics(event: TrainingEvent, wanted: Collection[str] | None) -> TrainingEvent:
    if wanted is None or "metrics" not in event.data:
        return event
    kept = {name: value for name, value in event.data["metrics"].items() if name in wanted}
    return replace(event, data={**event.data, "metrics": kept})
