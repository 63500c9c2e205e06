"""Groups with rewards become the batch of one update: samples with advantages, drop reasons, and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress

import numpy as np

from mlx_parallm.config import ResolvedLoss, RewardScale
from mlx_parallm.core import AdapterRef, GivenTrajectory, Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.collect.groups import FEEDBACK, DropReason
from mlx_parallm.rl.objectives.advantages import GroupAdvantages, group_advantages, no_signal
from mlx_parallm.rl.objectives.rewards import RewardHistory

# ---- what an update learns from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with its advantage.

    `sampling_logprobs`: one for each completion token, fp32, in nats; empty if unknown. `group`: samples with the same
    number have the same prompt. `on_policy`: the version in training drew the sample.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    temperature: float
    advantage: float
    group: int
    on_policy: bool = True

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The samples of one optimizer step, and their metrics (reward_mean, staleness, ...).

    `step_scale`: factor of the step, 0 to 1; below 1 if only a part of the batch has a signal. The step itself is
    scaled, since AdamW makes nearly the same step for gradients of any size.
    """

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The trajectories of one group, and their rewards in the same order.

    `rewards` is empty if none were given. `scorer`: whose baseline a single trajectory is compared with. `staleness`:
    versions published since the trajectories were drawn. `on_policy`: the version in training drew them.
    """

    trajectories: tuple[Trajectory | GivenTrajectory, ...]
    rewards: tuple[float, ...]
    scorer: str
    staleness: int = 0
    on_policy: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether its rewards are compared with each other, and not with earlier ones. Equal scores from people are a
        signal: all samples of the prompt are good, or all are bad."""
        return len(self.trajectories) > 1 and not (self.scorer == FEEDBACK and no_signal(self.rewards))


def given_groups(
    trajectories: Iterable[GivenTrajectory], staleness: Callable[[AdapterRef], int] = lambda version: 0
) -> tuple[ScoredGroup, ...]:
    """Groups a client's trajectories by `group_id`, or by prompt if they have none; in order of appearance.

    `staleness`: of the version that drew a trajectory; it raises if the version cannot be trained on.

    Raises:
        InvalidRequestError: a trajectory cannot be trained on, or only some of them have a reward.
    """
    trajectories = tuple(trajectories)
    groups: dict[object, list[GivenTrajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        _check(trajectory, f"trajectories[{number}]")
        groups.setdefault(trajectory.group_id or trajectory.prompt_ids, []).append(trajectory)
    if len({trajectory.reward is None for trajectory in trajectories}) > 1:
        raise InvalidRequestError("trajectories: give a reward with each of them, or with none", "trajectories")
    return tuple(
        ScoredGroup(
            tuple(group),
            tuple(each.reward for each in group if each.reward is not None),
            "given",
            max(staleness(each.adapter) if each.adapter else 0 for each in group),
        )
        for group in groups.values()
    )


def _check(trajectory: GivenTrajectory, param: str) -> None:
    logprobs = trajectory.sampling_logprobs
    if not trajectory.prompt_ids or not trajectory.completion_ids:
        raise InvalidRequestError(f"{param}: give one prompt token and one completion token at least", param)
    if logprobs and len(logprobs) != len(trajectory.completion_ids):
        raise InvalidRequestError(
            f"{param}: {len(logprobs)} sampling_logprobs for {len(trajectory.completion_ids)} completion tokens; give "
            "one for each, or none",
            param,
        )
    if not all(map(math.isfinite, (trajectory.reward or 0.0, *logprobs))):
        raise InvalidRequestError(f"{param}: reward and sampling_logprobs must be finite numbers", param)
    if not (trajectory.temperature > 0 and math.isfinite(trajectory.temperature)):
        raise InvalidRequestError(f"{param}: temperature must be above 0", param)


# ---- the batch of an update ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """`drop_reasons`: for each group, in order, why it is not in the batch; None if it is."""

    batch: UpdateBatch
    drop_reasons: tuple[DropReason | None, ...]


def prepare(
    groups: Sequence[ScoredGroup], loss: ResolvedLoss, history: RewardHistory, wanted: int | None = None
) -> PreparedBatch:
    """The batch of one update.

    The loss cross_entropy imitates the samples whose reward exceeds `imitation_threshold`, and those without a reward.
    Every other loss compares rewards within their group, and samples without a group with their scorer's earlier
    rewards.

    Args:
        wanted: trajectories with a signal that make a whole update; None: as many as there are. With fewer of them the
            step is smaller in proportion.
    """
    if loss.imitates:
        return _prepare_imitation(groups, loss.imitation_threshold)
    scaled = loss.scale_rewards is not RewardScale.NONE
    compared = iter(group_advantages([group.rewards for group in groups if group.is_compared], loss.scale_rewards))
    advantages = [
        next(compared) if group.is_compared else _single_advantages(group, history, scaled) for group in groups
    ]
    batch = UpdateBatch(
        _samples(groups, advantages), _reward_metrics(groups) | _metrics(groups), _step_scale(advantages, wanted)
    )
    return PreparedBatch(batch, tuple(group.dropped for group in advantages))


def _prepare_imitation(groups: Sequence[ScoredGroup], threshold: float) -> PreparedBatch:
    kept = [_above(group, threshold) for group in groups]
    samples = _samples(kept, [GroupAdvantages((1.0,) * len(group.trajectories)) for group in kept])
    reasons = tuple(None if group.trajectories else DropReason.LOW_REWARD for group in kept)
    return PreparedBatch(UpdateBatch(samples, _metrics(kept)), reasons)


def _above(group: ScoredGroup, threshold: float) -> ScoredGroup:
    if not group.rewards:
        return group
    above = [reward > threshold for reward in group.rewards]
    return replace(
        group, trajectories=tuple(compress(group.trajectories, above)), rewards=tuple(compress(group.rewards, above))
    )


def _single_advantages(group: ScoredGroup, history: RewardHistory, scaled: bool) -> GroupAdvantages:
    advantages = [history.advantage(group.scorer, reward, scaled) for reward in group.rewards]
    values = tuple(advantage or 0.0 for advantage in advantages)
    if None in advantages:
        return GroupAdvantages.none(len(values), DropReason.SINGLE)
    if not any(values):
        return GroupAdvantages.none(len(values), DropReason.ZERO_VARIANCE)
    return GroupAdvantages(values, strength=min(1.0, float(np.abs(values).mean())) if scaled else 1.0)


def _step_scale(advantages: Sequence[GroupAdvantages], wanted: int | None) -> float:
    """The fraction of the wanted trajectories that have a signal; weak ones count in part."""
    given = sum(len(group.values) for group in advantages)
    wanted = given if wanted is None else min(wanted, given)
    with_signal = sum(group.strength * len(group.values) for group in advantages)
    return min(1.0, with_signal / wanted) if wanted else 1.0


def _samples(groups: Sequence[ScoredGroup], advantages: Sequence[GroupAdvantages]) -> tuple[Sample, ...]:
    """The samples of the groups that are not dropped."""
    return tuple(
        Sample(
            trajectory.prompt_ids,
            trajectory.completion_ids,
            trajectory.sampling_logprobs,
            trajectory.temperature,
            advantage=value,
            group=number,
            # It is unknown what drew a trajectory without logprobs: the trainer's own take their place.
            on_policy=group.on_policy or not trajectory.sampling_logprobs,
        )
        for number, (group, computed) in enumerate(zip(groups, advantages, strict=True))
        if computed.dropped is None
        for trajectory, value in zip(group.trajectories, computed.values, strict=True)
    )


def _reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Of all rewards, those of dropped groups included; the standard deviation divides by n."""
    rewards = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if rewards.size else {}


def _metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    tokens = [len(trajectory.completion_ids) for group in groups for trajectory in group.trajectories]
    staleness = [group.staleness for group in groups for _ in group.trajectories]
    if not tokens:
        return {}
    return {
        "groups": float(len(groups)),
        "trajectories": float(len(tokens)),
        "completion_tokens": float(np.mean(tokens)),
        "staleness": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
    }
