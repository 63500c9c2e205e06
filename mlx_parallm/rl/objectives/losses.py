"""The loss functions of an update, as pure functions of logprobs.

π_θ is the policy in training, π_old the one before the update, μ the one that drew the tokens. With r = π_θ / π_old,
w = min(π_old / μ, mismatch_cap) and the advantage A of the sequence, the loss of a token is

    grpo, bnpo, dapo, dr_grpo   -w min(r A, clip(r) A); if A < 0, at most w dual_clip |A|
    gspo                        the same with one r for the whole sequence, exp of the mean of log r
    cispo                       -w min(r, 1 + clip_high) A log π_θ; only the last factor has a gradient
    cross_entropy               -log π_θ

plus kl_coef · k3 - entropy_coef · H. k3 estimates the KL divergence from the base model, and H is the entropy.

A reduction gives the factor of each sequence's sum of token losses; these products add up to the loss of the update.
The factors depend on totals of the whole update. So the sum over its micro-batches is the same however the update is
split, which a mean over micro-batches would not be.

To add a loss, add its name and defaults to `config.Algorithm` and `config.ALGORITHM_DEFAULTS`, and its functions to
`ALGORITHMS` below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.rl.objectives.batches import Sample

_MOST_LOG_RATIO = 20.0
"""Log ratios are clipped here, so that no exp overflows. Beyond it they have no gradient."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch of B sequences; C is the length of the longest completion. Logprobs and entropy are in nats.

    `logp`: of π_θ. `old_logp`: of π_old. `sampling_logp`: of μ. `ref_logp`: of the base model. `entropy`: of π_θ.
    `mask`: 1 on trained tokens, 0 on padding, where the other arrays may hold anything, even NaN. All these are
    fp32 [B, C]; `advantages` is fp32 [B]. Only `logp` and `entropy` get gradients.
    """

    logp: mx.array
    old_logp: mx.array
    sampling_logp: mx.array
    mask: mx.array
    advantages: mx.array
    ref_logp: mx.array | None = None
    entropy: mx.array | None = None


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over the trained tokens of one micro-batch; lazy fp32 scalars.

    `kl`: k3 of the policy and the base model. `mismatch_kl`: k3 of μ and π_old. None: there is no data for it.
    `ratio_max` is the largest ratio, not a sum.
    """

    tokens: mx.array
    ratio: mx.array
    ratio_max: mx.array
    clipped: mx.array
    dual_clipped: mx.array
    mismatch_kl: mx.array
    kl: mx.array | None
    entropy: mx.array | None

    def arrays(self) -> list[mx.array]:
        """The arrays that are not None, for `mx.eval`."""
        every = (getattr(self, field.name) for field in fields(self))
        return [array for array in every if array is not None]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Totals of the whole update, as one micro-batch needs them: sequences N, trained tokens ΣT_i, groups.

    `group_tokens`: for each row of the micro-batch, the trained tokens of its group in the update, fp32 [B].
    """

    sequences: int
    tokens: int
    groups: int
    group_tokens: mx.array


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update. `group_tokens`: trained tokens of each group, by `Sample.group`."""

    sequences: int
    tokens: int
    group_tokens: Mapping[int, int]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> UpdateTotals:
        """`samples`: all samples that the update trains on."""
        group_tokens: Counter[int] = Counter()
        for sample in samples:
            group_tokens[sample.group] += len(sample.completion_ids)
        return cls(len(samples), group_tokens.total(), group_tokens)

    def for_rows(self, rows: Sequence[Sample]) -> Denominators:
        """The denominators for one micro-batch."""
        per_row = mx.array([self.group_tokens[row.group] for row in rows], mx.float32)
        return Denominators(self.sequences, self.tokens, len(self.group_tokens), per_row)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The policy loss of each token, and the ratio in it; [B, C] or [B, 1].

    `clipped`, `dual_clipped`: whether that clip applies, so that the token has no gradient (except with cispo).
    """

    policy: mx.array
    ratio: mx.array
    clipped: mx.array
    dual_clipped: mx.array


Objective = Callable[[TokenBatch, ResolvedLoss], TokenTerms]

Reduction = Callable[[mx.array, Denominators, ResolvedLoss], mx.array]
"""(mask [B, C], denominators, config) → factors of the rows' sums, [B] or [1]."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """The loss of tokens, and how they are combined."""

    objective: Objective
    reduction: Reduction


def loss(batch: TokenBatch, denominators: Denominators, config: ResolvedLoss) -> tuple[mx.array, LossStats]:
    """The part of the update's loss that comes from one micro-batch, fp32 scalar. The parts add up to the loss.

    Raises:
        ValueError: `kl_coef` or `entropy_coef` is set, and the batch lacks the array that it needs.
    """
    rule = ALGORITHMS[config.algorithm]
    batch = _trained_only(batch)
    terms = rule.objective(batch, config)
    kl = None if batch.ref_logp is None else k3(batch.logp, batch.ref_logp)
    per_token = terms.policy + _weighted("kl_coef", config.kl_coef, kl)
    per_token = per_token - _weighted("entropy_coef", config.entropy_coef, batch.entropy)
    weights = rule.reduction(batch.mask, denominators, config)
    return ((per_token * batch.mask).sum(-1) * weights).sum(), _stats(batch, terms, kl)


def k3(logp: mx.array, reference: mx.array) -> mx.array:
    """Estimate of KL(p ‖ reference) at each token that p drew: expm1(δ) - δ with δ = reference - logp; at least 0."""
    delta = mx.minimum(reference - logp, _MOST_LOG_RATIO)
    return mx.expm1(delta) - delta


def means(parts: Sequence[LossStats]) -> dict[str, float]:
    """Means over the trained tokens of all micro-batches: ratio_mean, clip_fraction, dual_clip_fraction, mismatch_kl,
    and kl and entropy if known; and ratio_max, the largest ratio of any token."""
    columns = {
        "ratio_mean": [part.ratio for part in parts],
        "clip_fraction": [part.clipped for part in parts],
        "dual_clip_fraction": [part.dual_clipped for part in parts],
        "mismatch_kl": [part.mismatch_kl for part in parts],
        "kl": [part.kl for part in parts if part.kl is not None],
        "entropy": [part.entropy for part in parts if part.entropy is not None],
    }
    tokens = max(sum(float(part.tokens) for part in parts), 1.0)
    figures = {name: sum(map(float, column)) / tokens for name, column in columns.items() if column}
    return figures | {"ratio_max": max((float(part.ratio_max) for part in parts), default=0.0)}


def _trained_only(batch: TokenBatch) -> TokenBatch:
    """Puts zeros on padding. Masking only after an exp would give padding the gradient 0 · NaN."""
    keep = batch.mask > 0

    def kept(values: mx.array) -> mx.array:
        return mx.where(keep, values, 0.0)

    return TokenBatch(
        logp=kept(batch.logp),
        old_logp=mx.stop_gradient(kept(batch.old_logp)),
        sampling_logp=mx.stop_gradient(kept(batch.sampling_logp)),
        mask=batch.mask,
        advantages=mx.where(keep.any(-1), batch.advantages, 0.0),
        ref_logp=None if batch.ref_logp is None else mx.stop_gradient(kept(batch.ref_logp)),
        entropy=None if batch.entropy is None else kept(batch.entropy),
    )


# ---- objectives ----------------------------------------------------------------------------------


def _token_clip(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    return _clipped_objective(batch, _ratio(batch.logp - batch.old_logp), config)


def _sequence_clip(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """GSPO (arXiv 2507.18071): every token has the ratio of its sequence, and that ratio's gradient."""
    change = ((batch.logp - batch.old_logp) * batch.mask).sum(-1, keepdims=True)
    tokens = mx.maximum(batch.mask.sum(-1, keepdims=True), 1.0)
    return _clipped_objective(batch, _ratio(change / tokens), config)


def _clipped_objective(batch: TokenBatch, ratio: mx.array, config: ResolvedLoss) -> TokenTerms:
    """The clipped objective of PPO (arXiv 1707.06347), a lower bound of the unclipped one.

    For a negative advantage it decreases with the ratio without limit, so a single token that became much more likely
    since it was drawn could dominate the update. Dual-clip PPO (arXiv 1912.09729) stops it at dual_clip · A.
    """
    advantages = batch.advantages[:, None]
    unclipped = ratio * advantages
    clipped = mx.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    bound = mx.minimum(unclipped, clipped)
    floor = mx.where(advantages < 0, config.dual_clip * advantages, -mx.inf)
    weights = _mismatch_weights(batch, config)
    return TokenTerms(-weights * mx.maximum(bound, floor), ratio, clipped < unclipped, bound < floor)


def _cispo(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """CISPO (arXiv 2506.13585): the ratio is a bounded weight without a gradient, so every token keeps its gradient."""
    ratio = _ratio(batch.logp - batch.old_logp)
    most = 1.0 + config.clip_high
    weights = mx.stop_gradient(mx.minimum(ratio, most)) * _mismatch_weights(batch, config)
    return TokenTerms(-weights * batch.advantages[:, None] * batch.logp, ratio, ratio > most, mx.zeros_like(ratio))


def _cross_entropy(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """Imitation: advantages, ratios and the sampler are not used."""
    ratio = _ratio(batch.logp - batch.old_logp)
    return TokenTerms(-batch.logp, ratio, mx.zeros_like(ratio), mx.zeros_like(ratio))


def _mismatch_weights(batch: TokenBatch, config: ResolvedLoss) -> mx.array:
    """min(π_old / μ, mismatch_cap) at each token, [B, C]; exactly 1 if the two are equal."""
    return mx.minimum(_ratio(batch.old_logp - batch.sampling_logp), config.mismatch_cap)


def _ratio(log_ratio: mx.array) -> mx.array:
    return mx.exp(mx.minimum(log_ratio, _MOST_LOG_RATIO))


def _weighted(name: str, coefficient: float, values: mx.array | None) -> mx.array | float:
    if not coefficient:
        return 0.0
    if values is None:
        raise ValueError(f"{name} is set, and the batch lacks the array for it")
    return coefficient * values


def _stats(batch: TokenBatch, terms: TokenTerms, kl: mx.array | None) -> LossStats:
    def total(values: mx.array) -> mx.array:
        return mx.stop_gradient((values * batch.mask).sum())

    return LossStats(
        tokens=batch.mask.sum(),
        ratio=total(terms.ratio),
        ratio_max=mx.stop_gradient((terms.ratio * batch.mask).max()),
        clipped=total(terms.clipped),
        dual_clipped=total(terms.dual_clipped),
        mismatch_kl=total(k3(batch.sampling_logp, batch.old_logp)),
        kl=None if kl is None else total(kl),
        entropy=None if batch.entropy is None else total(batch.entropy),
    )


# ---- reductions ----------------------------------------------------------------------------------


def _sequence_mean(mask: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over sequences of the mean over their tokens: 1 / (N T_i)."""
    return 1.0 / (mx.maximum(mask.sum(-1), 1.0) * max(whole.sequences, 1))


def _group_mean(mask: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over groups of the mean over all tokens of the group, also if micro-batches split it."""
    return 1.0 / (mx.maximum(whole.group_tokens, 1.0) * max(whole.groups, 1))


def _token_mean(mask: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over all tokens of the update: 1 / ΣT_i."""
    return mx.array([1.0 / max(whole.tokens, 1)])


def _length_constant(mask: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """1 / (N L_max): the weight of a token does not depend on the length of its sequence."""
    return mx.array([1.0 / (max(whole.sequences, 1) * config.max_completion_tokens)])


ALGORITHMS: Mapping[Algorithm, LossRule] = {
    Algorithm.GRPO: LossRule(_token_clip, _sequence_mean),
    Algorithm.BNPO: LossRule(_token_clip, _group_mean),
    Algorithm.DAPO: LossRule(_token_clip, _token_mean),
    Algorithm.DR_GRPO: LossRule(_token_clip, _length_constant),
    Algorithm.GSPO: LossRule(_sequence_clip, _sequence_mean),
    Algorithm.CISPO: LossRule(_cispo, _token_mean),
    Algorithm.CROSS_ENTROPY: LossRule(_cross_entropy, _token_mean),
}
