"""Response objects of the training routes, made from what training reports. Numbers that are not finite become null,
because JSON has none, and times are texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from mlx_parallm.core import (
    AdapterRef,
    Divergence,
    EvaluationResult,
    RolloutStatus,
    TrainingEvent,
    TrainingStatus,
    TrajectoryCard,
    UpdateReport,
)
from mlx_parallm.server.api.fields import WireOutput


def utc(seconds: float) -> str:
    """Unix seconds as ISO-8601, to the millisecond: `2026-11-03T12:00:00.250Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class LevelObject(WireOutput):
    """A level of the tasks."""

    level: str
    """Its name."""
    success: float
    """Mean reward of its recent tasks, from 0 to 1."""
    share: float
    """Probability that the next task is of this level."""
    drawn: int
    """Tasks of it since the curriculum began."""


class RolloutsObject(WireOutput):
    """Rollouts that the server draws by itself."""

    environment: str
    """The environment that the tasks come from."""
    state: Literal["drawing", "waiting", "paused", "failed"]
    """`drawing`; `waiting`: the next update has enough trajectories; `paused`, as training or the engine is; `failed`:
    nothing more is drawn."""
    tasks_taken: int
    """Tasks taken from the environment, those of earlier processes of the run included."""
    groups_drawn: int
    """Tasks answered since start."""
    tasks_failed: int
    """Tasks since start that could not be answered."""
    last_failure: str
    """The last failure of a task, an episode or the environment; empty if there was none."""

    levels: list[LevelObject]
    """Those of the curriculum, as far as they are known; empty without a curriculum."""

    @classmethod
    def of(cls, status: RolloutStatus) -> RolloutsObject:
        return cls(**asdict(status))


class DivergenceObject(WireOutput):
    """A figure of training that is beyond its limit."""

    signal: str
    """`not_finite`, `kl_step`, `ratio`, `kl`, `entropy`, `length` or `reward`."""
    value: float | None
    """The figure; null if it is not finite."""
    limit: float | None
    """Its limit; null for `not_finite`."""
    action: str
    """What was done: `tell`, `hold`, `pause` or `roll_back`."""
    reason: str
    """The same in words."""
    at: str
    """Time in ISO-8601, UTC."""


def divergence_object(found: Divergence) -> DivergenceObject:
    return DivergenceObject(
        signal=found.signal,
        value=finite(found.value),
        limit=found.limit,
        action=found.action,
        reason=found.reason,
        at=utc(found.at),
    )


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


class EvaluationObject(WireOutput):
    """The mean reward of one version on the held-out tasks."""

    lora_adapter: str
    """The version that was evaluated."""
    step: int
    """Optimizer steps of the version."""
    mean: float
    """Mean reward."""
    low: float
    """Lower bound of the 95 % confidence interval of the mean."""
    high: float
    """Upper bound of that interval."""
    answers: int
    """Answers that were scored, or episodes that have ended with a reward."""
    failed: int
    """Held-out tasks of which an answer or an episode failed, or could not be scored. Such ones are left out."""
    at: str
    """Time in ISO-8601, UTC."""


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
    divergences: list[DivergenceObject]
    """The last divergences, oldest first, 8 at most."""
    advice: str
    """What to change, because nearly all answers earn the same part of the reward; empty if there is nothing."""
    evaluation: EvaluationObject | None
    """The last evaluation; null if there was none."""
    rollouts: RolloutsObject | None
    """The rollouts of the environment that the server draws by itself; null if it draws none."""
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


class GroupObject(WireOutput):
    """A group that requests have named."""

    group_id: str
    """Its id."""
    lora_adapter: str
    """The adapter that it trains."""
    members: int
    """Answers or episodes in it."""
    rewarded: int
    """Those that have a reward."""
    complete: bool
    """Whether an update can take it now. A group with a `scoring_function` is complete when its members are scored."""


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
    finish_reason: Literal["stop", "length"] | None
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
        divergences=[divergence_object(each) for each in status.last_divergences],
        advice=status.advice,
        evaluation=None if status.evaluation is None else evaluation_object(status.evaluation),
        rollouts=None if status.rollouts is None else RolloutsObject.of(status.rollouts),
        best_lora=_name(status.best),
        available_checkpoints=list(status.checkpoints),
        trained_adapters=list(status.trained),
        ratio=finite(status.metrics.get("ratio_mean")),
        **{name: finite(status.metrics.get(name)) for name in FIGURES},
    )


def evaluation_object(result: EvaluationResult) -> EvaluationObject:
    return EvaluationObject(
        lora_adapter=str(result.adapter),
        step=result.step,
        mean=result.mean,
        low=result.low,
        high=result.high,
        answers=result.answers,
        failed=result.failed,
        at=utc(result.at),
    )


def debug_object(status: TrainingStatus, current: AdapterRef | None) -> DebugAdapterTraining:
    return DebugAdapterTraining(**status_object(status, current).model_dump(), detail=as_json(status.detail))


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


def trajectory_object(card: TrajectoryCard) -> DebugTrajectory:
    trajectory = card.trajectory
    return DebugTrajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        episode_id=trajectory.collection.episode_id or None,
        turn=trajectory.collection.turn,
        lora_adapter=_name(trajectory.adapter),
        state=card.state,
        reason=card.reason,
        reward=finite(card.reward),
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
