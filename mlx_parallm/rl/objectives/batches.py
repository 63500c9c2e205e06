"""Builds the batch of one update from groups with rewards: samples, drop reasons, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from statistics import fmean

import numpy as np

from mlx_parallm.config import LossKind, ResolvedLoss, RewardScale
from mlx_parallm.core import FinishReason, Signal
from mlx_parallm.rl.collect.groups import FEEDBACK, DropReason
from mlx_parallm.rl.objectives.advantages import GroupAdvantages, group_advantages, no_signal, reward_range
from mlx_parallm.rl.objectives.episodes import Episode, samples_of, token_advantages, token_deviation
from mlx_parallm.rl.objectives.rewards import RewardHistory
from mlx_parallm.train.data import Datum, UpdateBatch

# ---- what an update learns from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The episodes of one group, and their rewards in the same order.

    `rewards` is empty if none were given. `scorer`: a single episode is compared with earlier rewards of this scorer.
    `staleness`: versions published since the oldest of its turns was drawn. `on_policy`: the version in training drew
    all of them. `signal`: what it teaches. `remembered`: its one answer is an old one that is learnt again, as if the
    version in training had sampled it now.
    """

    episodes: tuple[Episode, ...]
    rewards: tuple[float, ...]
    scorer: str
    staleness: int = 0
    on_policy: bool = False
    signal: Signal = Signal.REWARDS
    remembered: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether its rewards are compared with each other. Otherwise each is compared with the scorer's earlier
        rewards.

        A single sample has no other one to be compared with. Equal scores from people say that all samples are good,
        or that all are bad, unless they say which tokens are.
        """
        if self.has_advantages:
            return False
        return len(self.episodes) > 1 and not (self.scorer == FEEDBACK and self.no_signal)

    @property
    def no_signal(self) -> DropReason | None:
        """Why nothing is learnt from comparing its rewards; None if something is. Episodes with equal rewards differ if
        those of their tokens do."""
        reason = no_signal(self.rewards)
        return None if reason is DropReason.ZERO_VARIANCE and token_deviation(self.episodes) else reason

    @property
    def has_advantages(self) -> bool:
        """Whether a client gave the advantages of all its tokens."""
        return all(episode.has_advantages for episode in self.episodes)


# ---- the batch of an update ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The batch of one update, and the advantages of all of its groups, in order."""

    batch: UpdateBatch
    advantages: tuple[GroupAdvantages, ...]

    @property
    def drop_reasons(self) -> tuple[DropReason | None, ...]:
        """For each group, why it is not in the batch; None if it is."""
        return tuple(group.dropped for group in self.advantages)


def prepare(
    groups: Sequence[ScoredGroup], loss: ResolvedLoss, history: RewardHistory, wanted: int | None = None
) -> PreparedBatch:
    """The batch of one update.

    The loss cross_entropy imitates the samples whose reward exceeds `imitation_threshold`, and those without a reward.
    The loss dpo takes the best and the worst sample of each group. For kto, a sample is desirable if its reward exceeds
    the mean of its group, or `imitation_threshold` if it is compared with no other one. Distillation takes all samples,
    whatever their rewards. Every other loss compares rewards within their group, and samples without a group with their
    scorer's earlier rewards. Advantages that a client has given are taken as they are.

    Args:
        wanted: how many trajectories with a signal make a whole update; None, or more than there are: all that there
            are. If fewer have a signal, the step is smaller in proportion.
    """
    if loss.kind is LossKind.SFT:
        return _prepare_imitation(groups, loss)
    if loss.kind is LossKind.PAIRWISE:
        return _prepare_pairs(groups, loss, wanted)
    if loss.reads_teacher:  # which says how good each token is
        return batch_of(groups, [GroupAdvantages((0.0,) * len(group.episodes)) for group in groups], loss, wanted)
    if loss.kind is LossKind.KTO:
        return batch_of(groups, [_rated(group, loss.imitation_threshold) for group in groups], loss, wanted)
    scaled = loss.scale_rewards is not RewardScale.NONE
    compared = iter(_compared_advantages([group for group in groups if group.is_compared], loss.scale_rewards, history))
    given = iter(_given_advantages([group for group in groups if group.has_advantages]))
    advantages = [
        next(given)
        if group.has_advantages
        else next(compared)
        if group.is_compared
        else _single_advantages(group, history, scaled)
        for group in groups
    ]
    return batch_of(groups, advantages, loss, wanted)


def batch_of(
    groups: Sequence[ScoredGroup],
    advantages: Sequence[GroupAdvantages],
    loss: ResolvedLoss,
    wanted: int | None = None,
) -> PreparedBatch:
    """The batch of these groups with these advantages. `wanted`: see `prepare`."""
    samples, new = _samples(groups, advantages, loss.mask_truncated), [each for each in groups if not each.remembered]
    batch = UpdateBatch(samples, _reward_metrics(new) | _metrics(new), _step_scale(advantages, wanted))
    return PreparedBatch(batch, tuple(advantages))


def _prepare_imitation(groups: Sequence[ScoredGroup], loss: ResolvedLoss) -> PreparedBatch:
    kept = [_above(group, loss.imitation_threshold) for group in groups]
    advantages = [GroupAdvantages((1.0,) * len(group.episodes)) for group in kept]
    samples = _samples(kept, advantages, loss.mask_truncated)
    imitated = tuple(_imitated(group, loss.imitation_threshold) for group in groups)
    return PreparedBatch(UpdateBatch(samples, _metrics(kept)), imitated)


def _prepare_pairs(groups: Sequence[ScoredGroup], loss: ResolvedLoss, wanted: int | None) -> PreparedBatch:
    considered = [_untruncated(group) for group in groups] if loss.mask_truncated else groups
    reasons = [no_signal(group.rewards) for group in considered]
    signals = [
        GroupAdvantages.none(len(group.rewards), reason) if reason else GroupAdvantages((0.0,) * len(group.rewards))
        for group, reason in zip(groups, reasons, strict=True)
    ]
    pairs = [_extremes(group) for group, reason in zip(considered, reasons, strict=True) if reason is None]
    samples = _samples(pairs, [GroupAdvantages((1.0, -1.0))] * len(pairs), mask_truncated=False, one_each=True)
    batch = UpdateBatch(samples, _reward_metrics(groups) | _metrics(groups), _step_scale(signals, wanted))
    ends = iter(pairs)
    chosen = (
        signal if reason else _chosen(group, next(ends))
        for group, signal, reason in zip(groups, signals, reasons, strict=True)
    )
    return PreparedBatch(batch, tuple(chosen))


def _imitated(group: ScoredGroup, threshold: float) -> GroupAdvantages:
    """1 for each episode that is imitated, 0 for the others."""
    values = tuple(float(reward > threshold) for reward in group.rewards) or (1.0,) * len(group.episodes)
    return GroupAdvantages(values, None if any(values) else DropReason.LOW_REWARD)


def _chosen(group: ScoredGroup, ends: ScoredGroup) -> GroupAdvantages:
    """1 for the best episode of a group, -1 for the worst one, 0 for the others. `ends`: see `_extremes`."""
    best, worst = ends.episodes
    return GroupAdvantages(tuple(float(each is best) - float(each is worst) for each in group.episodes))


def _rated(group: ScoredGroup, threshold: float) -> GroupAdvantages:
    """1 for a desirable trajectory, -1 for an undesirable one, 0 for one that has just the mean reward of its group."""
    reason = no_signal(group.rewards)  # rewards of tokens do not count
    is_compared = group.is_compared and not (reason and group.scorer == FEEDBACK)
    if is_compared and reason:
        return GroupAdvantages.none(len(group.rewards), reason)
    if is_compared:
        return GroupAdvantages(tuple(np.sign(np.subtract(group.rewards, fmean(group.rewards))).tolist()))
    return GroupAdvantages(tuple(1.0 if reward > threshold else -1.0 for reward in group.rewards))


def _untruncated(group: ScoredGroup) -> ScoredGroup:
    whole = [episode.finish_reason is not FinishReason.LENGTH for episode in group.episodes]
    return _only(group, whole)


def _extremes(group: ScoredGroup) -> ScoredGroup:
    """The best episode of a group, and the worst."""
    order = sorted(range(len(group.rewards)), key=lambda at: -group.rewards[at])
    ends = (order[0], order[-1])
    return replace(
        group,
        episodes=tuple(group.episodes[at] for at in ends),
        rewards=tuple(group.rewards[at] for at in ends),
    )


def _above(group: ScoredGroup, threshold: float) -> ScoredGroup:
    if not group.rewards:
        return group
    return _only(group, [reward > threshold for reward in group.rewards])


def _only(group: ScoredGroup, kept: Sequence[bool]) -> ScoredGroup:
    return replace(group, episodes=tuple(compress(group.episodes, kept)), rewards=tuple(compress(group.rewards, kept)))


def _given_advantages(groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
    """Keeps all groups, whose tokens have the advantages that a client gave (see `token_advantages`); or none of them,
    if these are all 0."""
    turns = (turn for group in groups for episode in group.episodes for turn in episode.turns)
    reason = None if any(any(turn.advantages) for turn in turns) else DropReason.ZERO_VARIANCE
    return [GroupAdvantages((0.0,) * len(group.episodes), reason) for group in groups]


def _compared_advantages(
    groups: Sequence[ScoredGroup], scale: RewardScale, history: RewardHistory
) -> tuple[GroupAdvantages, ...]:
    rewards = [group.rewards for group in groups]
    ranges = [(group.scorer, reward_range(group.rewards)) for group in groups]
    return group_advantages(rewards, scale, history.ranges(ranges), [token_deviation(each.episodes) for each in groups])


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


def _samples(
    groups: Sequence[ScoredGroup],
    advantages: Sequence[GroupAdvantages],
    mask_truncated: bool,
    one_each: bool = False,
) -> tuple[Datum, ...]:
    """The samples of the groups that are not dropped. `one_each`: of each episode, the longest one only."""
    made: list[Datum] = []
    for number, (group, computed) in enumerate(zip(groups, advantages, strict=True)):
        if computed.dropped is not None or not group.episodes:
            continue
        values = token_advantages(group.episodes, computed.values, computed.divisor)
        for episode, of_turns in zip(group.episodes, values, strict=True):
            samples = list(samples_of(episode, of_turns, number, group.on_policy, mask_truncated))
            if samples and one_each:
                samples = [replace(max(samples, key=lambda sample: len(sample.token_ids)), share=1.0)]
            made += [replace(sample, sampling_logprobs=()) for sample in samples] if group.remembered else samples
    return tuple(made)


def _reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The mean and standard deviation of all rewards, also of dropped groups. The deviation divides by n."""
    rewards = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if rewards.size else {}


def _metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    tokens = [episode.completion_tokens for group in groups for episode in group.episodes]
    staleness = [group.staleness for group in groups for _ in group.episodes]
    turns = [len(episode.turns) for group in groups for episode in group.episodes]
    if not tokens:
        return {}
    return {
        "groups": float(len(groups)),
        "trajectories": float(len(tokens)),
        "turns": float(np.mean(turns)),
        "completion_tokens": float(np.mean(tokens)),
        "staleness": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
    }
