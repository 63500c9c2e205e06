"""Groups with rewards become the batch of one update: samples with advantages, drop reasons, and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from mlx_parallm.config import ResolvedLoss, RewardScale
from mlx_parallm.core import AdapterRef, GivenTrajectory, Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.collect.groups import FEEDBACK, DropReason, GroupMember, TrajectoryGroup
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
    """The samples of one group, still without advantages, and their rewards in the same order.

    `rewards` is empty if none were given. `scorer`: whose baseline a single sample is compared with. `staleness`:
    versions published since the samples were drawn.
    """

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    scorer: str
    staleness: int = 0


def collected_group(
    group: TrajectoryGroup, members: Sequence[GroupMember], staleness: int, on_policy: bool
) -> ScoredGroup:
    """The given members of a collected group; all of them have rewards."""
    rewards = tuple(member.reward for member in members if member.reward is not None)
    samples = tuple(_sample(member.trajectory, on_policy) for member in members)
    from_feedback = all(member.from_feedback for member in members)
    return ScoredGroup(samples, rewards, FEEDBACK if from_feedback else group.scorer or FEEDBACK, staleness)


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
            # It is unknown which policy drew them: without logprobs the trainer's own take their place.
            tuple(_sample(each, on_policy=not each.sampling_logprobs) for each in group),
            tuple(each.reward for each in group if each.reward is not None),
            "given",
            max(staleness(each.adapter) if each.adapter else 0 for each in group),
        )
        for group in groups.values()
    )


def _sample(trajectory: Trajectory | GivenTrajectory, on_policy: bool) -> Sample:
    return Sample(
        prompt_ids=trajectory.prompt_ids,
        completion_ids=trajectory.completion_ids,
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=trajectory.temperature,
        advantage=0.0,
        group=0,
        on_policy=on_policy,
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
    compared = iter(group_advantages([g.rewards for g in groups if not _is_single(g)], loss.scale_rewards))
    scaled = loss.scale_rewards is not RewardScale.NONE
    advantages = [_single_advantages(g, history, scaled) if _is_single(g) else next(compared) for g in groups]
    batch = UpdateBatch(
        _with_advantages(groups, advantages),
        _reward_metrics(groups) | _metrics(groups),
        _step_scale(advantages, wanted),
    )
    return PreparedBatch(batch, tuple(group.dropped for group in advantages))


def group_without_signal(group: TrajectoryGroup) -> DropReason | None:
    """Why a complete group cannot be trained on, if its rewards alone show that; None otherwise."""
    rewards = [member.reward for member in group.scored if member.reward is not None]
    if group.scorer is None or len(rewards) < 2 or all(member.from_feedback for member in group.scored):
        return None  # it is compared with its scorer's earlier rewards
    return no_signal(rewards)


def _prepare_imitation(groups: Sequence[ScoredGroup], threshold: float) -> PreparedBatch:
    kept = [_above(group, threshold) for group in groups]
    samples = _with_advantages(kept, [GroupAdvantages((1.0,) * len(group.samples)) for group in kept])
    reasons = tuple(None if group.samples else DropReason.LOW_REWARD for group in kept)
    return PreparedBatch(UpdateBatch(samples, _metrics(kept)), reasons)


def _above(group: ScoredGroup, threshold: float) -> ScoredGroup:
    if not group.rewards:
        return group
    kept = [at for at, reward in enumerate(group.rewards) if reward > threshold]
    samples, rewards = tuple(group.samples[at] for at in kept), tuple(group.rewards[at] for at in kept)
    return replace(group, samples=samples, rewards=rewards)


def _is_single(group: ScoredGroup) -> bool:
    """Whether its samples are not compared with each other. Equal scores from people are a signal: all samples of the
    prompt are good, or all are bad."""
    all_equal = no_signal(group.rewards) is DropReason.ZERO_VARIANCE
    return len(group.samples) == 1 or (group.scorer == FEEDBACK and all_equal)


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


def _with_advantages(groups: Sequence[ScoredGroup], advantages: Sequence[GroupAdvantages]) -> tuple[Sample, ...]:
    return tuple(
        replace(sample, advantage=value, group=number)
        for number, (group, computed) in enumerate(zip(groups, advantages, strict=True))
        if computed.dropped is None
        for sample, value in zip(group.samples, computed.values, strict=True)
    )


def _reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Of all rewards, those of dropped groups included; the standard deviation divides by n."""
    rewards = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if rewards.size else {}


def _metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    staleness = [group.staleness for group in groups for _ in group.samples]
    if not samples:
        return {}
    return {
        "groups": float(len(groups)),
        "trajectories": float(len(samples)),
        "completion_tokens": float(np.mean([len(sample.completion_ids) for sample in samples])),
        "staleness": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
    }
