"""`/v1/training/history`: what has happened in the training of an adapter since the run began."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated

from fastapi import Query
from pydantic import Field

from mlx_parallm.rl.status import TrainingEvent, TrainingHistory
from mlx_parallm.server.access import Role
from mlx_parallm.server.request import adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep, TrainingDep

MAX_EVENTS, MAX_METRICS, MAX_NAME = 2000, 64, 128

router = Router()

Metrics = Annotated[
    list[Annotated[str, Field(max_length=MAX_NAME)]] | None,
    Query(max_length=MAX_METRICS, description="A metric that is wanted; may be repeated. Default: all metrics."),
]


@router.get("/v1/training/history", role=Role.TRAIN)
async def history(
    services: ServicesDep,
    training: TrainingDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS, description="Maximum number of events.")] = 500,
    metric: Metrics = None,
) -> TrainingHistory:
    """What has happened in the training of an adapter since the run began, as the events that reported it. The stream
    of events continues from there."""
    with adapter_named_by("lora_adapter", lora_adapter):
        history = training.history(lora_adapter, limit, reader=services.key.reader)
    return replace(history, data=tuple(_with_metrics(event, metric) for event in history.data))


def _with_metrics(event: TrainingEvent, wanted: Collection[str] | None) -> TrainingEvent:
    """The event with those of its metrics that are wanted. None keeps all."""
    if wanted is None or "metrics" not in event.data:
        return event
    kept = {name: value for name, value in event.data["metrics"].items() if name in wanted}
    return replace(event, data={**event.data, "metrics": kept})
