"""Response objects of the training routes, made from what training reports. Numbers that are not finite become null,
because JSON has none, and times are texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.json_values import finite, utc
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.status import (
    Divergence,
    EvaluationResult,
    RolloutStatus,
    TrainingEvent,
    TrainingStatus,
    UpdateReport,
)
from mlx_parallm.rl.trajectories import GroupMember
from mlx_parallm.server.api.fields import FinishReasonText, WireOutput


def as_json(value: Any) -> Any:
    """Makes `value` fit JSON: numbers that are not finite become null, and objects of other types become strings."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in metrics.items()}


class UpdateObject(WireOutput):
    """The result of one update."""

    status: Literal["published", "trained", "held", "skipped"]
    """`published`: the new version is live. `trained`: it is not published, as requested. `held`: the gate refused it,
    and the adapter is unchanged. `skipped`: there was nothing to learn."""
    reason: str
    """Why it was held or skipped."""
    lora_adapter: str | None
    """The new version."""
    step: int
    """Optimizer steps so far."""
    metrics: dict[str, float | None]
    """Metrics of the update by name; null if not finite."""
    checkpoint: str | None
    """Name of the checkpoint, if one was saved; never null if `checkpoint_name` was given."""
    signal: Literal["rewards", "late_feedback", "preferences", "corrections"]
    """What it learnt from: answers with `rewards`, or what people said."""


class TrainingObject(WireOutput):
    """The training of one adapter."""

    training_enabled: bool
    """Whether the server trains."""
    state: str
    """`disabled`, `idle`, `running`, `updating`, `paused` or `stopped`."""
    pause_reason: str | None
    """Why no automatic updates are made: `asked`, or in words; null if they are."""
    lora_adapter: str | None
    """The trained adapter."""
    live_lora: str | None
    """Its live version."""
    current_lora: str | None
    """The version with the largest share of the requests that name no adapter; it may be of another adapter. null: the
    base model."""
    step: int
    """Optimizer steps so far."""
    trajectories_collected: int
    """Trajectories collected since start."""
    trajectories_waiting: int
    """Trajectories that wait for a reward."""
    groups_ready: int
    """Complete groups that wait for an update."""
    groups_open: int
    """Groups with a `group_id` or `episode_id` that wait for more answers."""
    turns: dict[str, int]
    """Turns of episodes: `first`; `continued`, whose prompts continue the tokens of an earlier turn; and `apart`, which
    do not, so that each of them becomes a sample of its own."""
    updates_total: int
    """Updates since start."""
    updates_per_second: float
    """Recent rate of updates."""
    last_update: str | None
    """Time of the last update, in ISO-8601, UTC."""
    loss: float | None
    """Loss of the last update. This and the fields down to `staleness` are null if not known."""
    reward_mean: float | None
    """Mean reward of the last update."""
    reward_std: float | None
    """Standard deviation of the rewards of the last update."""
    reward_running_mean: float | None
    """Running mean of the rewards over updates."""
    kl: float | None
    """KL divergence from the base model in nats a token; estimated from a sample of the tokens, unless it is part of
    the loss."""
    entropy: float | None
    """Entropy in nats a token."""
    clip_fraction: float | None
    """Share of tokens that were clipped, 0 to 1."""
    ratio: float | None
    """Mean importance ratio."""
    staleness: float | None
    """Mean number of versions between sampling and training."""
    metrics: dict[str, float | None]
    """All metrics of the last update, by name."""
    drops: dict[str, int]
    """Trajectories dropped, by reason."""
    skips: dict[str, int]
    """Updates skipped, by reason."""
    divergences: tuple[Divergence, ...]
    """The last divergences, oldest first, 8 at most."""
    advice: str
    """What to change, because nearly all answers earn the same part of the reward; empty if there is nothing."""
    evaluation: EvaluationResult | None
    """The last evaluation; null if there was none."""
    rollouts: RolloutStatus | None
    """The rollouts of the environment that the server samples by itself; null if it samples none."""
    best_lora: str | None
    """The version with the best evaluation; without evaluations, with the best running mean of rewards."""
    available_checkpoints: list[str]
    """Names of its checkpoints, oldest first, each followed by its tags."""
    trained_adapters: list[str]
    """All adapters that this server trains."""


class FeedbackObject(WireOutput):
    """The reward that was set."""

    status: Literal["success"]
    trajectory_id: str | None = None
    """The answer that was rewarded."""
    episode_id: str | None = None
    """The episode that was rewarded."""
    score: float
    """The score that was sent; of `token_rewards`, their sum."""
    reward: float | None = None
    """With `trajectory_id` and `score`: the reward of the answer now, the mean of the last scores of all people. Late
    scores count as 1 or -1."""
    people: int | None = None
    """The number of people in that mean."""
    late: bool = False
    """The answer had been dropped, because it was too old or nobody had judged it. Its feedback is learnt from all the
    same, in updates of their own."""


class EventObject(WireOutput):
    """One event of the stream."""

    kind: str
    """The kind of event; also its name in the stream."""
    at: str
    """Time in ISO-8601, UTC."""
    data: dict[str, Any]
    """Details, by kind."""


class DebugAdapterTraining(TrainingObject):
    """The training of one adapter, with details."""

    detail: dict[str, Any]
    """The trainer's state, for people."""


class DebugTraining(WireOutput):
    """The training of all adapters, with details."""

    training_enabled: bool
    """Whether the server trains."""
    adapters: list[DebugAdapterTraining]
    """One for each trained adapter."""


class DebugTrajectory(WireOutput):
    """One trajectory."""

    trajectory_id: str
    """Its id."""
    group_id: str
    """Id of its group: the trajectories of one prompt."""
    group_size: int
    """Number of trajectories that the group will have; 0 if that is not known."""
    episode_id: str | None
    """The episode that it is a turn of; null if there is none."""
    turn: int | None
    """Its place in the episode, if the request gave one."""
    lora_adapter: str | None
    """The adapter version that it was sampled from; `base@0` for the base model. null: unknown, it was drawn
    elsewhere."""
    state: str
    """`waiting` (for a reward), `scored`, `training`, `trained` or `dropped`."""
    reason: str
    """Why it was dropped; empty if it was not."""
    reward: float | None
    """Its reward; null if it has none yet."""
    scoring_function: str | None
    """The scorer that rewards it; null if its reward comes as feedback."""
    metadata: dict[str, Any]
    """Data for the scorer."""
    prompt_token_ids: list[int]
    """Token ids of the prompt."""
    completion_token_ids: list[int]
    """Token ids of the completion, as sampled."""
    sampling_logprobs: list[float | None]
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from."""
    temperature: float
    """The temperature of sampling."""
    text: str
    """Text of the completion."""
    finish_reason: FinishReasonText | None
    """Why the completion ended; null if it is unknown."""
    created: str
    """Time in ISO-8601, UTC."""


class DebugTrajectories(WireOutput):
    """The newest trajectories."""

    object: Literal["list"]
    data: list[DebugTrajectory]
    """Newest first."""


FIGURES = ("loss", "reward_mean", "reward_std", "kl", "entropy", "clip_fraction", "staleness")
"""Metrics of the last update that are also fields of the status, under the same names."""


def status_object(status: TrainingStatus, current: AdapterRef | None) -> TrainingObject:
    """Makes the response object of a status.

    `current` is the version that requests get if they name no adapter; None is the base model.
    """
    return TrainingObject(
        training_enabled=status.state != "disabled",
        state=status.state,
        pause_reason=status.pause_reason,
        lora_adapter=status.adapter or None,
        live_lora=_name(status.current),
        current_lora=_name(current),
        step=status.step,
        trajectories_collected=status.trajectories_collected,
        trajectories_waiting=status.trajectories_waiting,
        groups_ready=status.groups_ready,
        groups_open=status.groups_open,
        turns=dict(status.turns),
        updates_total=status.updates_total,
        updates_per_second=status.updates_per_second,
        last_update=None if status.last_update is None else utc(status.last_update),
        reward_running_mean=finite(status.reward_running_mean),
        metrics=finite_metrics(status.metrics),
        drops=dict(status.drops),
        skips=dict(status.skips),
        divergences=status.last_divergences,
        advice=status.advice,
        evaluation=status.evaluation,
        rollouts=status.rollouts,
        best_lora=_name(status.best),
        available_checkpoints=list(status.checkpoints),
        trained_adapters=list(status.trained),
        ratio=finite(status.metrics.get("ratio_mean")),
        **{name: finite(status.metrics.get(name)) for name in FIGURES},
    )


def debug_object(status: TrainingStatus, current: AdapterRef | None) -> DebugAdapterTraining:
    return DebugAdapterTraining(**dict(status_object(status, current)), detail=as_json(status.detail))


def update_object(report: UpdateReport) -> UpdateObject:
    return UpdateObject.model_validate(
        {
            "status": report.status,
            "reason": report.reason,
            "lora_adapter": _name(report.adapter),
            "step": report.step,
            "metrics": finite_metrics(report.metrics),
            "checkpoint": report.checkpoint,
            "signal": report.signal.value,
        }
    )


def event_object(event: TrainingEvent) -> EventObject:
    return EventObject(kind=event.kind, at=utc(event.at), data=as_json(event.data))


def trajectory_object(trajectory: Trajectory, member: GroupMember) -> DebugTrajectory:
    return DebugTrajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        episode_id=trajectory.collection.episode_id or None,
        turn=trajectory.collection.turn,
        lora_adapter=_name(trajectory.adapter),
        state=member.state.value,
        reason=member.reason or "",
        reward=finite(member.reward),
        scoring_function=trajectory.collection.scorer,
        metadata=as_json(trajectory.collection.metadata),
        prompt_token_ids=list(trajectory.prompt_ids),
        completion_token_ids=list(trajectory.completion_ids),
        sampling_logprobs=[finite(logprob) for logprob in trajectory.sampling_logprobs],
        temperature=trajectory.temperature,
        text=trajectory.text,
        finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
        created=utc(trajectory.created),
    )


def _name(ref: AdapterRef | None) -> str | None:
    return None if ref is None else str(ref)
