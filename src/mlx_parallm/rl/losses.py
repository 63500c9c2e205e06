"""The objectives of an update, as pure functions of logprobs.

With r = π_θ / π_old, w = min(π_old / μ, mismatch_cap) and the sequence's advantage A, a token's loss is

    grpo, bnpo, dapo, dr_grpo   -w min(r A, clip(r) A); where A < 0, at most w dual_clip |A|
    gspo                        the same with one r for the sequence, exp of the mean of log r
    cispo                       -w min(r, 1 + clip_high) A log π_θ, a gradient in the last factor only
    cross_entropy               -log π_θ

plus kl_coef · k3 - entropy_coef · H. `reductions` says how tokens make up the update's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from mlx_parallm.rl.reductions import (
    Denominators,
    Reduction,
    group_mean,
    length_constant,
    sequence_mean,
    token_mean,
)
from mlx_parallm.rl.settings import Algorithm, LossSettings, RewardScale

_MOST_LOG_RATIO = 20.0
"""Logarithms of ratios stop here, with their gradient, so that no exp overflows."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B sequences, C the longest completion; all fp32 [B, C], nats, but for `advantages`, fp32 [B].

    `logp`: π_θ's. `old_logp`: π_old's. `sampling_logp`: those of μ, which drew the tokens. `ref_logp`: the base's.
    `entropy`: of π_θ. `mask`: 1 on trained tokens, 0 on padding, where the others may hold anything, NaN included.
    Gradients go to `logp` and `entropy` alone.
    """

    logp: mx.array
    old_logp: mx.array
    sampling_logp: mx.array
    mask: mx.array
    advantages: mx.array
    ref_logp: mx.array | None = None
    entropy: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Sums over the trained tokens of one micro-batch, fp32 scalars, lazy.

    `kl`: k3 of policy and base. `mismatch_kl`: k3 of μ and π_old. None: there was nothing to compute it from.
    `ratio_max` is no sum but the largest ratio.
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
        """Those that exist, for `mx.eval`."""
        every = (getattr(self, field.name) for field in fields(self))
        return [array for array in every if array is not None]


@dataclass(frozen=True, slots=True)
class LossDefaults:
    """What the paper of an algorithm uses."""

    clip_low: float
    clip_high: float
    scale_rewards: RewardScale


@dataclass(frozen=True, slots=True)
class Terms:
    """An objective at each token, [B, C] or [B, 1]. `clipped`, `dual_clipped`: whether that clip bounds it, so that it
    gives no gradient (but for cispo, which keeps it)."""

    policy: mx.array
    ratio: mx.array
    clipped: mx.array
    dual_clipped: mx.array


Objective = Callable[[TokenBatch, LossSettings], Terms]


@dataclass(frozen=True, slots=True)
class Rule:
    """One algorithm."""

    objective: Objective
    reduction: Reduction
    defaults: LossDefaults


def loss(batch: TokenBatch, denominators: Denominators, settings: LossSettings) -> tuple[mx.array, Stats]:
    """What one micro-batch contributes to the update's loss, fp32 scalar: the contributions add up to it.

    Raises:
        ValueError: a coefficient is set and the batch lacks what it weighs.
    """
    rule = ALGORITHMS[settings.algorithm]
    batch = _trained_only(batch)
    terms = rule.objective(batch, settings)
    kl = None if batch.ref_logp is None else k3(batch.logp, batch.ref_logp)
    per_token = terms.policy + _weighed("kl_coef", settings.kl_coef, kl)
    per_token = per_token - _weighed("entropy_coef", settings.entropy_coef, batch.entropy)
    weights = rule.reduction(batch.mask, denominators, settings)
    return ((per_token * batch.mask).sum(-1) * weights).sum(), _stats(batch, terms, kl)


def defaults(algorithm: Algorithm) -> LossDefaults:
    """Clip range and reward scale where the operator sets none."""
    return ALGORITHMS[algorithm].defaults


def k3(logp: mx.array, reference: mx.array) -> mx.array:
    """Estimate of KL(p ‖ reference) from tokens that p drew, per token and ≥ 0: expm1(δ) - δ, δ = reference - logp."""
    delta = mx.minimum(reference - logp, _MOST_LOG_RATIO)
    return mx.expm1(delta) - delta


def means(parts: Sequence[Stats]) -> dict[str, float]:
    """Of all micro-batches, per trained token: ratio_mean, clip_fraction, dual_clip_fraction, mismatch_kl; kl, entropy
    where known. And ratio_max, the largest ratio of any token."""
    columns = {
        "ratio_mean": [part.ratio for part in parts],
        "clip_fraction": [part.clipped for part in parts],
        "dual_clip_fraction": [part.dual_clipped for part in parts],
        "mismatch_kl": [part.mismatch_kl for part in parts],
        "kl": [part.kl for part in parts if part.kl is not None],
        "entropy": [part.entropy for part in parts if part.entropy is not None],
    }
    tokens = max(_summed([part.tokens for part in parts]), 1.0)
    figures = {name: _summed(column) / tokens for name, column in columns.items() if column}
    return figures | {"ratio_max": max((float(part.ratio_max) for part in parts), default=0.0)}


def _summed(column: Sequence[mx.array]) -> float:
    return sum(float(each) for each in column)


def _trained_only(batch: TokenBatch) -> TokenBatch:
    """Zeros where nothing is trained, before any exp: after it a gradient there would be 0 · NaN."""
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


def _token_clip(batch: TokenBatch, settings: LossSettings) -> Terms:
    return _pessimistic(batch, _ratio(batch.logp - batch.old_logp), settings)


def _sequence_clip(batch: TokenBatch, settings: LossSettings) -> Terms:
    """GSPO (arXiv 2507.18071): every token of a sequence has the sequence's ratio and its gradient."""
    change = ((batch.logp - batch.old_logp) * batch.mask).sum(-1, keepdims=True)
    tokens = mx.maximum(batch.mask.sum(-1, keepdims=True), 1.0)
    return _pessimistic(batch, _ratio(change / tokens), settings)


def _pessimistic(batch: TokenBatch, ratio: mx.array, settings: LossSettings) -> Terms:
    """PPO's lower bound (arXiv 1707.06347): clipping never makes a change look better than it is.

    For a negative advantage that bound grows with the ratio without limit, so that one token which became far likelier
    since it was drawn would be the whole update: there it ends at dual_clip · A (dual-clip PPO, arXiv 1912.09729).
    """
    advantages = batch.advantages[:, None]
    free = ratio * advantages
    held = mx.clip(ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages
    bound = mx.minimum(free, held)
    floor = mx.where(advantages < 0, settings.dual_clip * advantages, -mx.inf)
    weights = _mismatch(batch, settings)
    return Terms(-weights * mx.maximum(bound, floor), ratio, held < free, bound < floor)


def _cispo(batch: TokenBatch, settings: LossSettings) -> Terms:
    """CISPO (arXiv 2506.13585): the ratio is a bounded weight, so no token loses its gradient."""
    ratio = _ratio(batch.logp - batch.old_logp)
    most = 1.0 + settings.clip_high
    weights = mx.stop_gradient(mx.minimum(ratio, most)) * _mismatch(batch, settings)
    return Terms(-weights * batch.advantages[:, None] * batch.logp, ratio, ratio > most, mx.zeros_like(ratio))


def _cross_entropy(batch: TokenBatch, settings: LossSettings) -> Terms:
    """Advantages, ratios and the sampler play no part."""
    ratio = _ratio(batch.logp - batch.old_logp)
    return Terms(-batch.logp, ratio, mx.zeros_like(ratio), mx.zeros_like(ratio))


def _mismatch(batch: TokenBatch, settings: LossSettings) -> mx.array:
    """[B, C]: π_old / μ, truncated at each token; exactly 1 where the two are equal."""
    return mx.minimum(_ratio(batch.old_logp - batch.sampling_logp), settings.mismatch_cap)


def _ratio(log_ratio: mx.array) -> mx.array:
    return mx.exp(mx.minimum(log_ratio, _MOST_LOG_RATIO))


def _weighed(name: str, coefficient: float, values: mx.array | None) -> mx.array | float:
    if not coefficient:
        return 0.0
    if values is None:
        raise ValueError(f"{name} is set: the batch must carry what it weighs")
    return coefficient * values


def _stats(batch: TokenBatch, terms: Terms, kl: mx.array | None) -> Stats:
    def total(values: mx.array) -> mx.array:
        return mx.stop_gradient((values * batch.mask).sum())

    return Stats(
        tokens=batch.mask.sum(),
        ratio=total(terms.ratio),
        ratio_max=mx.stop_gradient((terms.ratio * batch.mask).max()),
        clipped=total(terms.clipped),
        dual_clipped=total(terms.dual_clipped),
        mismatch_kl=total(k3(batch.sampling_logp, batch.old_logp)),
        kl=None if kl is None else total(kl),
        entropy=None if batch.entropy is None else total(batch.entropy),
    )


ALGORITHMS: Mapping[Algorithm, Rule] = {
    Algorithm.GRPO: Rule(_token_clip, sequence_mean, LossDefaults(0.2, 0.2, RewardScale.GROUP)),
    Algorithm.BNPO: Rule(_token_clip, group_mean, LossDefaults(0.2, 0.2, RewardScale.GROUP)),
    Algorithm.DAPO: Rule(_token_clip, token_mean, LossDefaults(0.2, 0.28, RewardScale.GROUP)),
    Algorithm.DR_GRPO: Rule(_token_clip, length_constant, LossDefaults(0.2, 0.2, RewardScale.NONE)),
    Algorithm.GSPO: Rule(_sequence_clip, sequence_mean, LossDefaults(3e-4, 4e-4, RewardScale.GROUP)),
    # No lower bound; the paper of CISPO gives no upper one: 5 is that of ScaleRL (arXiv 2510.13786).
    Algorithm.CISPO: Rule(_cispo, token_mean, LossDefaults(1.0, 4.0, RewardScale.GROUP)),
    Algorithm.CROSS_ENTROPY: Rule(_cross_entropy, token_mean, LossDefaults(0.2, 0.2, RewardScale.NONE)),
}
