"""What an update learns from: the groups of its batch, their advantages, and the data that are made of them.

Each signal has its own loss, and the adapter is the same:

    rewards         the configured loss
    late feedback   kto: people were for an answer or against it
    preferences     dpo: a chosen answer and a rejected one
    corrections     cross_entropy: an answer to imitate

The losses of the last three compare the policy with the base model or with nothing: they are off-policy, and limits of
staleness do not apply.

An update of rewards that looks for a way out of a plateau, where rewards within a group teach nothing, has advantages
of its own:

    better answers are known   all answers of the update and those are compared with each other by their rewards
    none is known              the answers that earn what nearly all earn are compared by their lengths: short is better

Learning good answers again is self-imitation (Oh et al. 2018, arXiv 1806.05635). Short answers cost less and earn as
much, and a policy whose answers are cut off by their limit learns to end them.

Turns of an episode become data:

    turn 0   prompt A | sampled B
    turn 1   A B | tool result C | sampled D        its prompt continues A B: both turns are one datum
    turn 2   prompt E | sampled F                   its prompt does not: a datum of its own

A turn that a client gives may have context between its sampled tokens; its mask says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, groupby
from math import fsum, sqrt
from operator import mul
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import Algorithm, LossKind, ResolvedLoss, RewardScale
from mlx_parallm.core.requests import FinishReason, Signal
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, Episode, Turn, finish_reason, owner_of
from mlx_parallm.train.advantages import EPSILON, GroupAdvantages, differ, group_advantages, reward_range
from mlx_parallm.train.data import Datum, SampledSpan, UpdateBatch


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
    def owner(self) -> str | None:
        """Who sent it; see `owner_of`."""
        return owner_of(turn for episode in self.episodes for turn in episode.turns)

    @property
    def has_advantages(self) -> bool:
        """Whether a client gave the advantages of all its tokens."""
        return all(episode.has_advantages for episode in self.episodes)


Advantages = GroupAdvantages | DropReason
"""The advantages of a group, or why the update does not train on it."""

TeacherLogprobs = tuple[tuple[float, ...], ...]
"""For each sample, the teacher's logprobs of its trained tokens, in nats; empty if the teacher could not score it."""


@dataclass(slots=True)
class PreparedUpdate:
    """One update that is about to be made.

    Attributes:
        groups: what it learns from. All have the same signal.
        advantages: of all groups, in order.
        history: of rewards, with those of these groups.
        wanted: how many trajectories with a signal make a whole update; None, or more than there are: all that there
            are. If fewer have a signal, the step is smaller in proportion.
        publish: whether a version is made of it.
        explores: whether it looks for a way out of a plateau.
        teacher_logprobs: None: the loss reads none, or the teacher was not asked yet.
        kept_shares: the part of a whole step that each owner has, as `rl.shares` limits it; set before it is learnt.
    """

    groups: Sequence[ScoredGroup]
    batch: UpdateBatch
    advantages: tuple[Advantages, ...]
    history: RewardHistory
    wanted: int | None = None
    publish: bool = True
    explores: bool = False
    teacher_logprobs: TeacherLogprobs | None = None
    kept_shares: Mapping[str | None, float] = field(default_factory=dict)

    @property
    def signal(self) -> Signal:
        return signal_of(self.groups)

    @property
    def drop_reasons(self) -> tuple[DropReason | None, ...]:
        """For each group, why it is not in the batch; None if it is."""
        return tuple(each if isinstance(each, DropReason) else None for each in self.advantages)


_ALGORITHMS: Mapping[Signal, Algorithm] = {
    Signal.LATE_FEEDBACK: Algorithm.KTO,
    Signal.PREFERENCES: Algorithm.DPO,
    Signal.CORRECTIONS: Algorithm.CROSS_ENTROPY,
}
_OF_REWARDS = ("reward_mean", "reward_std")
"""Metrics that say nothing about groups whose rewards stand for a choice."""


def signal_of(groups: Sequence[ScoredGroup]) -> Signal:
    """What the groups of one update teach; they all teach the same."""
    return groups[0].signal if groups else Signal.REWARDS


def loss_of(signal: Signal, configured: ResolvedLoss) -> ResolvedLoss:
    """The loss of an update that learns from this signal. Its coefficients are those of the configured one."""
    if signal is Signal.REWARDS:
        return configured
    return configured.model_copy(update={"algorithm": _ALGORITHMS[signal], "scale_rewards": RewardScale.NONE})


def prepare(
    groups: Sequence[ScoredGroup],
    configured: ResolvedLoss,
    history: RewardHistory,
    wanted: int | None = None,
    publish: bool = True,
    explores: bool = False,
    learning_rate: float | None = None,
) -> PreparedUpdate:
    """One update on groups that teach the same. The kind of the loss decides how advantages are made.

    SFT imitates the answers whose reward exceeds `imitation_threshold`, and those without a reward. PAIRWISE takes the
    best and the worst answer of each group. For KTO, an answer is desirable if its reward exceeds the mean of its
    group, or `imitation_threshold` if it is compared with no other one. POLICY_GRADIENT compares rewards within their
    group, and answers without a group with their scorer's earlier rewards; with a teacher, rewards do not matter.

    Args:
        history: gets the rewards of these groups.
        learning_rate: see `UpdateBatch`.
    """
    signal = signal_of(groups)
    loss = loss_of(signal, configured)
    if explores:
        advantages, wanted_now = _exploring(groups), None
    elif signal is Signal.LATE_FEEDBACK:
        advantages, wanted_now = [_verdict(group) for group in groups], wanted
        loss = _balanced(loss, advantages)
    else:
        advantages, wanted_now = _advantages(groups, loss, history), wanted
    batch = _batch(groups, advantages, loss, wanted_now)
    if signal is not Signal.REWARDS:
        metrics = {name: value for name, value in batch.metrics.items() if name not in _OF_REWARDS}
        batch = replace(batch, metrics=metrics, loss=loss)
    batch = replace(batch, learning_rate=learning_rate)
    return PreparedUpdate(groups, batch, tuple(advantages), history, wanted, publish, explores)


def no_signal(rewards: Sequence[float]) -> DropReason | None:
    """Why nothing is learnt from comparing these rewards; None if something is."""
    if len(rewards) < 2:
        return DropReason.SINGLE
    return None if differ(rewards) else DropReason.ZERO_VARIANCE


# ---- advantages ----------------------------------------------------------------------------------


def _advantages(groups: Sequence[ScoredGroup], loss: ResolvedLoss, history: RewardHistory) -> Sequence[Advantages]:
    match loss.kind:
        case LossKind.SFT:
            return [_imitated(group, loss.imitation_threshold) for group in groups]
        case LossKind.PAIRWISE:
            return [_best_and_worst(group, loss.mask_truncated) for group in groups]
        case LossKind.KTO:
            return [_desirable(group, loss.imitation_threshold) for group in groups]
        case LossKind.POLICY_GRADIENT:
            return _compared(groups, loss, history)


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


def _exploring(groups: Sequence[ScoredGroup]) -> Sequence[Advantages]:
    """The advantages of an update on a plateau."""
    if not groups:  # all that it had learnt from was forgotten
        return []
    scores = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    if not any(group.remembered for group in groups):
        scores = _by_length(groups, scores)
    if not differ(scores):
        return [DropReason.ZERO_VARIANCE] * len(groups)
    values = iter(((scores - scores.mean()) / (scores.std() + EPSILON)).tolist())
    return [GroupAdvantages(tuple(next(values) for _ in group.rewards)) for group in groups]


def _by_length(groups: Sequence[ScoredGroup], rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Minus the number of tokens of each answer, one more if it was cut off. Answers that earn less than the best of
    them are worse than all others."""
    episodes = list(chain.from_iterable(group.episodes for group in groups))
    cut_off = [episode.finish_reason is FinishReason.LENGTH for episode in episodes]
    lengths = np.array([episode.completion_tokens for episode in episodes], np.float64) + cut_off
    return -np.where(rewards < rewards.max(), lengths.max() + 1, lengths)


def _verdict(group: ScoredGroup) -> Advantages:
    """1 if most people were for the answer, -1 if most were against it. As many for it as against it say nothing."""
    reward = group.rewards[0]
    if reward == 0:
        return DropReason.ZERO_VARIANCE
    return GroupAdvantages((1.0 if reward > 0 else -1.0,))


def _balanced(loss: ResolvedLoss, verdicts: Sequence[Advantages]) -> ResolvedLoss:
    """The loss of an update whose answers people were for (1) or against (-1).

    Both kinds weigh the same in sum, times their configured weights, as the paper on KTO advises (arXiv 2402.01306,
    section 4.2). People are mostly against the answers of a model that has much to learn; without this, nearly all that
    an update does is to make what the model says less likely.
    """
    values = [each.values[0] for each in verdicts if isinstance(each, GroupAdvantages)]
    liked, disliked = values.count(1.0), values.count(-1.0)
    if not liked or not disliked:
        return loss
    mean = (liked + disliked) / 2
    return loss.model_copy(
        update={
            "kto_desirable_weight": loss.kto_desirable_weight * mean / liked,
            "kto_undesirable_weight": loss.kto_undesirable_weight * mean / disliked,
        }
    )


# ---- the batch -----------------------------------------------------------------------------------


def _batch(
    groups: Sequence[ScoredGroup], advantages: Sequence[Advantages], loss: ResolvedLoss, wanted: int | None
) -> UpdateBatch:
    """The batch of these groups with these advantages. `wanted`: see `PreparedUpdate`."""
    data = tuple(datum for _, _, of_episode in episode_data(groups, advantages, loss) for datum in of_episode)
    if loss.kind is LossKind.SFT:
        return UpdateBatch(data, _metrics(list(map(_imitated_only, groups, advantages))))
    new = [group for group in groups if not group.remembered]
    return UpdateBatch(data, _reward_metrics(new) | _metrics(new), _step_scale(groups, advantages, wanted))


def episode_data(
    groups: Sequence[ScoredGroup], advantages: Sequence[Advantages], loss: ResolvedLoss
) -> Iterator[tuple[int, int, Sequence[Datum]]]:
    """The data of an update, in order: for each episode that it learns from, the number of its group, its place in that
    group, and its data. Of an answer of a pair, only the longest one."""
    in_pairs, omits_zeros = loss.kind is LossKind.PAIRWISE, loss.kind in (LossKind.SFT, LossKind.PAIRWISE)
    for number, (group, computed) in enumerate(zip(groups, advantages, strict=True)):
        if isinstance(computed, DropReason):
            continue
        of_tokens = token_advantages(group.episodes, computed.values, computed.divisor)
        episodes = zip(group.episodes, computed.values, of_tokens, strict=True)
        for place, (episode, value, of_turns) in enumerate(episodes):
            if omits_zeros and not value:
                continue
            data = list(data_of(episode, of_turns, number, group.on_policy, loss.mask_truncated and not in_pairs))
            if data and in_pairs:
                data = [replace(max(data, key=lambda datum: len(datum.token_ids)), share=1.0)]
            yield number, place, [replace(datum, sampling_logprobs=()) for datum in data] if group.remembered else data


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


# ---- the tokens of episodes ----------------------------------------------------------------------


def sampled_spans(turn: Turn) -> Iterator[tuple[int, int]]:
    """Where tokens of the completion were sampled, as [start, stop)."""
    if not turn.mask:
        yield 0, len(turn.completion_ids)
        return
    for sampled, places in groupby(range(len(turn.mask)), key=turn.mask.__getitem__):
        if sampled:
            span = [*places]
            yield span[0], span[-1] + 1


def token_advantages(
    episodes: Sequence[Episode], advantages: Sequence[float], divisor: float | None
) -> list[list[list[float]]]:
    """The advantage of each token of the completions of the episodes of one group: [episode][turn][token].

    Those that a client has given with a turn are taken as they are. Otherwise:

    Without rewards of tokens, or without a divisor, every token of an episode has the advantage of the episode. That is
    (R - mean R) / divisor, where R is its whole reward. With them, a token is credited with what comes from it on only:
    the rewards of earlier tokens are subtracted from R, and those of earlier turns from the mean, each as they are in
    the mean of the group.
    """
    computed = _computed_advantages(episodes, advantages, divisor)
    return [
        [[*turn.advantages] or values for turn, values in zip(episode.turns, of_turns, strict=True)]
        for episode, of_turns in zip(episodes, computed, strict=True)
    ]


def token_deviation(episodes: Sequence[Episode]) -> float:
    """How far the credits of the tokens of one group are from 0, by rewards of tokens alone: the root of the mean
    square. 0 if the episodes do not differ in them."""
    if len({tuple(episode.token_rewards) for episode in episodes}) < 2:
        return 0.0
    credits = _computed_advantages(episodes, [0.0] * len(episodes), 1.0)
    values = [value for of_episode in credits for of_turn in of_episode for value in of_turn]
    return sqrt(fsum(value * value for value in values) / len(values))


def _computed_advantages(
    episodes: Sequence[Episode], advantages: Sequence[float], divisor: float | None
) -> list[list[list[float]]]:
    if divisor is None or not any(episode.token_rewards for episode in episodes):
        return [
            [[advantage] * len(turn.completion_ids) for turn in episode.turns]
            for episode, advantage in zip(episodes, advantages, strict=True)
        ]
    turns = max(len(episode.turns) for episode in episodes)
    means = [fsum(episode.rewards_before(turn) for episode in episodes) / len(episodes) for turn in range(turns)]
    return [
        [_of_turn(episode, turn, advantage, means[turn], divisor) for turn in range(len(episode.turns))]
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


def _of_turn(episode: Episode, turn: int, advantage: float, mean: float, divisor: float) -> list[float]:
    tokens = len(episode.turns[turn].completion_ids)
    rewards = episode.token_rewards[turn] if episode.token_rewards else ()
    earlier = accumulate(rewards or (0.0,) * tokens, initial=episode.rewards_before(turn))
    return [advantage + (mean - before) / divisor for before, _ in zip(earlier, range(tokens), strict=False)]


def data_of(
    episode: Episode,
    advantages: Sequence[Sequence[float]],
    group: int,
    on_policy: bool,
    mask_truncated: bool,
) -> Iterator[Datum]:
    """The data of one episode. A turn joins the longest datum that its prompt continues. Together they count as one
    sequence: the share of each is that of its tokens.

    Args:
        advantages: for each turn, those of the tokens of its completion.
        mask_truncated: learn nothing from turns that the token limit cut off.
    """
    drafts: list[_Draft] = []
    for turn, values in zip(episode.turns, advantages, strict=True):
        continued = [draft for draft in drafts if draft.is_continued_by(turn.prompt_ids)]
        if continued:
            draft = max(continued, key=lambda each: len(each.ids))
        else:
            drafts.append(draft := _Draft())
        draft.add(turn, values, trains=not (mask_truncated and finish_reason(turn) is FinishReason.LENGTH))
    whole = fsum(weight for draft in drafts for weight in draft.weights)
    for draft in drafts:
        if any(draft.weights):
            # Without logprobs it is unknown what sampled a turn. The trainer's own logprobs take their place.
            yield draft.datum(group, on_policy or not draft.has_logprobs, fsum(draft.weights) / whole)


@dataclass(slots=True)
class _Draft:
    """A datum that later turns may continue."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    sampled: list[SampledSpan] = field(default_factory=list)
    has_logprobs: bool = True
    has_reference: bool = True

    def is_continued_by(self, prompt_ids: Sequence[int]) -> bool:
        return len(prompt_ids) > len(self.ids) and list(prompt_ids[: len(self.ids)]) == self.ids

    def add(self, turn: Turn, advantages: Sequence[float], trains: bool) -> None:
        context, completion = turn.prompt_ids[len(self.ids) :], turn.completion_ids
        at = len(self.ids) + len(context)
        self.ids += [*context, *completion]
        self.weights += [0.0] * (len(context) + len(completion))
        self.advantages += [0.0] * len(context) + [*advantages]
        self.has_logprobs = self.has_logprobs and bool(turn.sampling_logprobs)
        self.logprobs += [0.0] * len(context) + list(turn.sampling_logprobs or (0.0,) * len(completion))
        self.has_reference = self.has_reference and bool(turn.reference_logprobs)
        self.reference += [0.0] * len(context) + list(turn.reference_logprobs or (0.0,) * len(completion))
        for start, stop in sampled_spans(turn):
            self.weights[at + start : at + stop] = [1.0 if trains else 0.0] * (stop - start)
            self.sampled.append(SampledSpan(at + start, at + stop, turn.temperature, turn.adapter, finish_reason(turn)))

    def datum(self, group: int, on_policy: bool, share: float) -> Datum:
        return Datum(
            tuple(self.ids),
            tuple(self.weights),
            tuple(self.advantages),
            tuple(self.logprobs) if self.has_logprobs else (),
            reference_logprobs=tuple(self.reference) if self.has_reference else (),
            sampled=tuple(self.sampled),
            group=group,
            on_policy=on_policy,
            share=share,
        )
