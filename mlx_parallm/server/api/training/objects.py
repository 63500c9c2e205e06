"""Response objects of the training routes that have more than what training reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import Figure, JsonObject, UnixTime, fields_of
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.status import TrainingStatus
from mlx_parallm.rl.trajectories import GroupMember, TrajectoryState
from mlx_parallm.server.api.fields import FinishReasonText, WireOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObject(TrainingStatus):
    """The training of one adapter."""

    training_enabled: bool
    """Whether the server trains."""
    current_lora: AdapterText | None
    """The version with the largest share of the requests that name no adapter; it may be of another adapter. null: the
    base model."""
    loss: Figure | None
    """Loss of the last update. This and the fields down to `staleness` are null if not known."""
    reward_mean: Figure | None
    """Mean reward of the last update."""
    reward_std: Figure | None
    """Standard deviation of the rewards of the last update."""
    kl: Figure | None
    """KL divergence from the base model in nats a token; estimated from a sample of the tokens, unless it is part of
    the loss."""
    entropy: Figure | None
    """Entropy in nats a token."""
    clip_fraction: Figure | None
    """Share of tokens that were clipped, 0 to 1."""
    ratio: Figure | None
    """Mean importance ratio."""
    staleness: Figure | None
    """Mean number of versions between sampling and training."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugAdapterTraining(TrainingObject):
    """The training of one adapter, with details."""

    detail: JsonObject
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
    lora_adapter: AdapterText | None
    """The adapter version that it was sampled from; `base@0` for the base model. null: unknown, it was drawn
    elsewhere."""
    state: TrajectoryState
    """`waiting` (for a reward), `scored`, `training`, `trained` or `dropped`."""
    reason: str
    """Why it was dropped; empty if it was not."""
    reward: Figure | None
    """Its reward; null if it has none yet."""
    scoring_function: str | None
    """The scorer that rewards it; null if its reward comes as feedback."""
    metadata: JsonObject
    """Data for the scorer."""
    prompt_token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    completion_token_ids: tuple[int, ...]
    """Token ids of the completion, as sampled."""
    sampling_logprobs: tuple[Figure, ...]
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from."""
    temperature: float
    """The temperature of sampling."""
    text: str
    """Text of the completion."""
    finish_reason: FinishReasonText | None
    """Why the completion ended; null if it is unknown."""
    created: UnixTime
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
    figures: dict[str, Any] = {name: status.metrics.get(name) for name in FIGURES}
    return TrainingObject(
        **fields_of(status),
        **figures,
        training_enabled=status.state != "disabled",
        current_lora=current,
        ratio=status.metrics.get("ratio_mean"),
    )


def trajectory_object(trajectory: Trajectory, member: GroupMember) -> DebugTrajectory:
    return DebugTrajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        episode_id=trajectory.collection.episode_id or None,
        turn=trajectory.collection.turn,
        lora_adapter=trajectory.adapter,
        state=member.state,
        reason=member.reason or "",
        reward=member.reward,
        scoring_function=trajectory.collection.scorer,
        metadata=trajectory.collection.metadata,
        prompt_token_ids=trajectory.prompt_ids,
        completion_token_ids=trajectory.completion_ids,
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=trajectory.temperature,
        text=trajectory.text,
        finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
        created=trajectory.created,
    )
