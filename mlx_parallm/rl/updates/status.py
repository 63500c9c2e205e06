"""The status of one adapter's training, put together from what its parts know."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.core import TrainingStatus
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.updates.adapter_training import AdapterTraining

_VERSIONS_SHOWN = 8


def training_status(
    training: AdapterTraining,
    buffer: TrajectoryBuffer,
    state: str,
    pause_reason: str | None,
    detail: Mapping[str, object],
) -> TrainingStatus:
    """The status of an adapter. The service adds `checkpoints` and `trained`. `detail`: what the loop knows besides."""
    best, reports, name = training.checkpoints.best, training.reports, training.name
    return TrainingStatus(
        state=state,
        pause_reason=pause_reason,
        adapter=name,
        current=training.live,
        step=reports.step,
        trajectories_collected=buffer.collected[name],
        trajectories_waiting=buffer.unrewarded(name),
        groups_ready=len(buffer.ready(name)),
        groups_open=buffer.still_open(name),
        updates_total=reports.updates,
        updates_per_second=reports.updates_per_second,
        last_update=reports.last_update,
        metrics=reports.metrics,
        drops={reason.value: count for reason, count in buffer.drops[name].items()},
        skips=dict(reports.skips),
        diverged=dict(training.watch.counts),
        last_divergences=tuple(training.watch.newest),
        advice=training.plateau.advice,
        reward_running_mean=training.rewards.trend.mean,
        best=best.ref if best else None,
        evaluation=training.evaluations.last,
        detail={
            "lineage": list(training.versions.last(_VERSIONS_SHOWN)),
            "unpublished": training.unpublished,
            "checkpoint_failures": training.checkpoints.failures,
            "evaluation_failures": training.evaluations.failures,
            "trajectories_trained": buffer.trained[name],
            **detail,
        },
    )
