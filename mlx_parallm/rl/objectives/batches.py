"""Builds the batch of one update from groups with rewards: samples, drop reasons, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import mul
from statistics import fmean

import numpy as np

from mlx_parallm.config import LossKind, ResolvedLoss, RewardScale
from mlx_parallm.core.requests import FinishReason, Signal
from mlx_parallm.rl.objectives.episodes import data_of, token_advantages, token_deviation
from mlx_parallm.rl.objectives.rewards import RewardHistory
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, Episode
from mlx_parallm.train.advantages import GroupAdvantages, differ, group_advantages, reward_range
from mlx_parallm.train.data import Datum, UpdateBatch

# ---- what an update learns from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The episodes of one group, and their rewards in the same order.

    `rewards` is empty if none were given. `scorer`: a single episode is compared with earlier rewards of this scorer.
    `staleness`: versions published since the oldest of its turns was sampled. `on_policy`: the version in training
    sampled all of them. `signal`: what it teaches. `remembered`: its one answer is an old one that is learnt again, as
    if the version in training had sampled it now.
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

Advantages = GroupAdvantages | DropReason
"""The advantages of a group, or why the update does not train on it."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The batch of one update, and the advantages of all of its groups, in order."""

    batch: UpdateBatch
    advantages: tuple[Advantages, ...]

    @property
    def drop_reasons(self) -> tuple[DropReason | None, ...]:
        """For each group, why it is not in the batch; None if it is."""
        return tuple(each if isinstance(each, DropReason) else None for each in self.advantages)


def prepare(
    groups: Sequence[ScoredGroup], loss: ResolvedLoss, history: RewardHistory, wanted: int | None = None
) -> PreparedBatch:
    """The batch of one update. The kind of the loss decides how advantages are made.

    SFT imitates the answers whose reward exceeds `imitation_threshold`, and those without a reward. PAIRWISE takes the
    best and the worst answer of each group. For KTO, an answer is desirable if its reward exceeds the mean of its
    group, or `imitation_threshold` if it is compared with no other one. POLICY_GRADIENT compares rewards within their
    group, and answers without a group with their scorer's earlier rewards; with a teacher, rewards do not matter.

    Args:
        wanted: how many trajectories with a signal make a whole update; None, or more than there are: all that there
            are. If fewer have a signal, the step is smaller in proportion.
    """
    match loss.kind:
        case LossKind.SFT:
            advantages = [_imitated(group, loss.imitation_threshold) for group in groups]
        case LossKind.PAIRWISE:
            advantages = [_best_and_worst(group, loss.mask_truncated) for group in groups]
        case LossKind.KTO:
            advantages = [_desirable(group, loss.imitation_threshold) for group in groups]
        case LossKind.POLICY_GRADIENT:
            advantages = _compared(groups, loss, history)
    return batch_of(groups, advantages, loss, wanted)


def batch_of(
    groups: Sequence[ScoredGroup], advantages: Sequence[Advantages], loss: ResolvedLoss, wanted: int | None = None
) -> PreparedBatch:
    """The batch of these groups with these advantages. `wanted`: see `prepare`."""
    data = _data(groups, advantages, loss)
    if loss.kind is LossKind.SFT:
        imitated = list(map(_imitated_only, groups, advantages))
        return PreparedBatch(UpdateBatch(data, _metrics(imitated)), tuple(advantages))
    new = [group for group in groups if not group.remembered]
    metrics = _reward_metrics(new) | _metrics(new)
    return PreparedBatch(UpdateBatch(data, metrics, _step_scale(groups, advantages, wanted)), tuple(advantages))


def no_signal(rewards: Sequence[float]) -> DropReason | None:
    """Why nothing is learnt from comparing these rewards; None if something is."""
    if len(rewards) < 2:
        return DropReason.SINGLE
    return None if differ(rewards) else DropReason.ZERO_VARIANCE


# -- advantages ----------------------------------------------------------------------------------


def _imitated(group: ScoredGroup, threshold: float) -> Advantages:
    """1 for each answer that is imitated, 0 for the others."""
    values = tuple(float(reward > threshold) for reward in group.rewards) or (1.0,) * len(group.episodes)
    return GroupAdvantages(values) if any(values) else DropReason.LOW_REWARD


def _best_and_worst(group: ScoredGroup, mask_truncated: bool) -> Advantages:
    """1 for the best answer of a group, -1 for the worst one, 0 for the others. `mask_truncated`: it is none that the
    token limit cut off."""
    ends = [episode.finish_reason for episode in group.episodes]
    considered = [at for at, end in enumerate(ends) if not (mask_truncated and end is FinishReason.LENGTH)]
    if reason := no_signal([group.rewards[at] for at in considered]):
        return reason
    best = max(considered, key=group.rewards.__getitem__)
    worst = min(reversed(considered), key=group.rewards.__getitem__)
    return GroupAdvantages(tuple(float(at == best) - float(at == worst) for at in range(len(ends))))


def _desirable(group: ScoredGroup, threshold: float) -> Advantages:
    """1 for a desirable answer, -1 for an undesirable one, 0 for one that has just the mean reward of its group."""
    reason = no_signal(group.rewards)  # rewards of tokens do not count
    is_compared = group.is_compared and not (reason and group.scorer == FEEDBACK)
    if not is_compared:
        return GroupAdvantages(tuple(1.0 if reward > threshold else -1.0 for reward in group.rewards))
    return reason or GroupAdvantages(tuple(np.sign(np.subtract(group.rewards, fmean(group.rewards))).tolist()))


def _compared(groups: Sequence[ScoredGroup], loss: ResolvedLoss, history: RewardHistory) -> list[Advantages]:
    """The advantages of each token of a turn are those that a client gave with it, if any; see `token_advantages`.
    Groups of such turns are all kept, or none of them if these are all 0."""
    if loss.reads_teacher:  # which says how good each token is
        return [GroupAdvantages((0.0,) * len(group.episodes)) for group in groups]
    rivals = [group for group in groups if group.is_compared]
    ranges = history.ranges([(group.scorer, reward_range(group.rewards)) for group in rivals])
    deviations = [token_deviation(group.episodes) for group in rivals]
    centred = iter(group_advantages([group.rewards for group in rivals], loss.scale_rewards, ranges, deviations))
    turns = (turn for group in groups if group.has_advantages for each in group.episodes for turn in each.turns)
    has_signal = any(any(turn.advantages) for turn in turns)
    advantages: list[Advantages] = []
    for group in groups:
        if group.has_advantages:
            zeros = GroupAdvantages((0.0,) * len(group.episodes))
            advantages.append(zeros if has_signal else DropReason.ZERO_VARIANCE)
        elif group.is_compared:
            advantages.append(next(centred) or no_signal(group.rewards) or DropReason.ZERO_VARIANCE)
        else:
            advantages.append(_single(group, history, loss.scale_rewards is not RewardScale.NONE))
    return advantages


def _single(group: ScoredGroup, history: RewardHistory, scaled: bool) -> Advantages:
    """The advantages over the scorer's earlier rewards."""
    values = [history.advantage(group.scorer, reward, scaled) for reward in group.rewards]
    known = tuple(value for value in values if value is not None)
    if len(known) < len(values):
        return DropReason.SINGLE
    if not any(known):
        return DropReason.ZERO_VARIANCE
    return GroupAdvantages(known, strength=min(1.0, float(np.abs(known).mean())) if scaled else 1.0)


# -- what they make ------------------------------------------------------------------------------


def _data(groups: Sequence[ScoredGroup], advantages: Sequence[Advantages], loss: ResolvedLoss) -> tuple[Datum, ...]:
    """The data of the groups that are not dropped. Of an answer of a pair, only the longest one."""
    made: list[Datum] = []
    in_pairs, omits_zeros = loss.kind is LossKind.PAIRWISE, loss.kind in (LossKind.SFT, LossKind.PAIRWISE)
    for number, (group, computed) in enumerate(zip(groups, advantages, strict=True)):
        if isinstance(computed, DropReason):
            continue
        of_tokens = token_advantages(group.episodes, computed.values, computed.divisor)
        for episode, value, of_turns in zip(group.episodes, computed.values, of_tokens, strict=True):
            if omits_zeros and not value:
                continue
            data = list(data_of(episode, of_turns, number, group.on_policy, loss.mask_truncated and not in_pairs))
            if data and in_pairs:
                data = [replace(max(data, key=lambda datum: len(datum.token_ids)), share=1.0)]
            made += [replace(datum, sampling_logprobs=()) for datum in data] if group.remembered else data
    return tuple(made)


def _step_scale(groups: Sequence[ScoredGroup], advantages: Sequence[Advantages], wanted: int | None) -> float:
    """The fraction of the wanted trajectories that have a signal; weak ones count in part."""
    sizes = [len(group.episodes) for group in groups]
    strengths = [0.0 if isinstance(each, DropReason) else each.strength for each in advantages]
    wanted = sum(sizes) if wanted is None else min(wanted, sum(sizes))
    return min(1.0, sum(map(mul, sizes, strengths)) / wanted) if wanted else 1.0


def _imitated_only(group: ScoredGroup, advantages: Advantages) -> ScoredGroup:
    values = () if isinstance(advantages, DropReason) else advantages.values
    return replace(group, episodes=tuple(compress(group.episodes, values)))


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
