"""Training's snapshots, reports and events, worded for the wire: no number that JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.core import AdapterRef, TrainingEvent, TrainingStatus, TrajectoryCard, UpdateReport
from mlx_parallm.server.wire.training import (
    DebugAdapterTraining,
    DebugTrajectory,
    EventObject,
    Training,
    Update,
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
"""Fields of a status → metrics of an update."""


def status_object(status: TrainingStatus) -> Training:
    return Training(
        training_enabled=status.enabled,
        state=status.state,
        lora_adapter=status.adapter or None,
        current_lora=_named(status.current),
        step=status.step,
        trajectories_collected=status.trajectories_collected,
        trajectories_waiting=status.trajectories_waiting,
        groups_ready=status.groups_ready,
        updates_total=status.updates_total,
        updates_per_second=status.updates_per_second,
        last_update=None if status.last_update is None else utc(status.last_update),
        reward_running_mean=_finite(status.reward_running_mean),
        metrics=_metrics(status.metrics),
        drops=dict(status.drops),
        skips=dict(status.skips),
        best_lora=_named(status.best),
        available_checkpoints=list(status.checkpoints),
        trained_adapters=list(status.trained),
        **{field: _finite(status.metrics.get(metric)) for field, metric in FIGURES.items()},
    )


def debug_object(status: TrainingStatus) -> DebugAdapterTraining:
    return DebugAdapterTraining(**status_object(status).model_dump(), detail=plain(status.detail))


def report_object(report: UpdateReport) -> Update:
    return Update.model_validate(
        {
            "status": report.status,
            "reason": report.reason,
            "lora_adapter": _named(report.adapter),
            "step": report.step,
            "metrics": _metrics(report.metrics),
            "checkpoint": report.checkpoint,
        }
    )


def event_object(event: TrainingEvent) -> EventObject:
    return EventObject(kind=event.kind, at=utc(event.at), data=plain(event.data))


def trajectory_object(card: TrajectoryCard) -> DebugTrajectory:
    drawn = card.trajectory
    return DebugTrajectory(
        trajectory_id=drawn.trajectory_id,
        group_id=drawn.group_id,
        group_size=drawn.group_size,
        lora_adapter=str(drawn.adapter),
        state=card.state,
        reason=card.reason,
        reward=_finite(card.reward),
        scoring_function=drawn.collection.scorer,
        metadata=plain(drawn.collection.metadata),
        prompt_token_ids=list(drawn.prompt_ids),
        completion_token_ids=list(drawn.completion_ids),
        sampling_logprobs=[_finite(logprob) for logprob in drawn.sampling_logprobs],
        temperature=drawn.temperature,
        text=drawn.text,
        finish_reason=drawn.finish_reason.value,
        created=utc(drawn.created),
    )


def utc(seconds: float) -> str:
    """Unix seconds as ISO-8601, to the millisecond: `2026-11-03T12:00:00.250Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """What JSON can say of `value`: a number that is not finite is null, what is no JSON its `str`."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return _finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in metrics.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _named(ref: AdapterRef | None) -> str | None:
    return None if ref is None else str(ref)
