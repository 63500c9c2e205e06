"""Converts training's status, reports, events and trajectories to response bodies; numbers that are not finite become
null, because JSON has none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.core import AdapterRef, TrainingEvent, TrainingStatus, TrajectoryCard, UpdateReport
from mlx_parallm.server.api.training.schema import (
    DebugAdapterTraining,
    DebugTrajectory,
    EventObject,
    TrainingObject,
    UpdateObject,
)

FIGURES = {
    "loss": "loss",
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "ratio": "ratio_mean",
    "staleness": "staleness",
}
"""Maps fields of the status to metrics of the last update."""


def status_object(status: TrainingStatus, current: AdapterRef | None) -> TrainingObject:
    """`current`: what requests that name no adapter get; None: the base model."""
    return TrainingObject(
        training_enabled=status.state != "disabled",
        state=status.state,
        lora_adapter=status.adapter or None,
        live_lora=_name(status.current),
        current_lora=_name(current),
        step=status.step,
        trajectories_collected=status.trajectories_collected,
        trajectories_waiting=status.trajectories_waiting,
        groups_ready=status.groups_ready,
        updates_total=status.updates_total,
        updates_per_second=status.updates_per_second,
        last_update=None if status.last_update is None else _utc(status.last_update),
        reward_running_mean=_finite(status.reward_running_mean),
        metrics=_metrics(status.metrics),
        drops=dict(status.drops),
        skips=dict(status.skips),
        best_lora=_name(status.best),
        available_checkpoints=list(status.checkpoints),
        trained_adapters=list(status.trained),
        **{field: _finite(status.metrics.get(metric)) for field, metric in FIGURES.items()},
    )


def debug_object(status: TrainingStatus, current: AdapterRef | None) -> DebugAdapterTraining:
    return DebugAdapterTraining(**status_object(status, current).model_dump(), detail=_json(status.detail))


def update_object(report: UpdateReport) -> UpdateObject:
    return UpdateObject.model_validate(
        {
            "status": report.status,
            "reason": report.reason,
            "lora_adapter": _name(report.adapter),
            "step": report.step,
            "metrics": _metrics(report.metrics),
            "checkpoint": report.checkpoint,
        }
    )


def event_object(event: TrainingEvent) -> EventObject:
    return EventObject(kind=event.kind, at=_utc(event.at), data=_json(event.data))


def trajectory_object(card: TrajectoryCard) -> DebugTrajectory:
    trajectory = card.trajectory
    return DebugTrajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        lora_adapter=str(trajectory.adapter),
        state=card.state,
        reason=card.reason,
        reward=_finite(card.reward),
        scoring_function=trajectory.collection.scorer,
        metadata=_json(trajectory.collection.metadata),
        prompt_token_ids=list(trajectory.prompt_ids),
        completion_token_ids=list(trajectory.completion_ids),
        sampling_logprobs=[_finite(logprob) for logprob in trajectory.sampling_logprobs],
        temperature=trajectory.temperature,
        text=trajectory.text,
        finish_reason=trajectory.finish_reason.value,
        created=_utc(trajectory.created),
    )


def _utc(seconds: float) -> str:
    """Unix seconds as ISO-8601, to the millisecond: `2026-11-03T12:00:00.250Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(value: Any) -> Any:
    """`value` as JSON values: numbers that are not finite become null, and objects that JSON lacks their `str`."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_json(inner) for inner in value]
    if isinstance(value, float):
        return _finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in metrics.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _name(ref: AdapterRef | None) -> str | None:
    return None if ref is None else str(ref)
