"""The loss functions of an update, as pure functions of logprobs.

π_θ is the policy in training, π_old the one before the update, μ the one that drew the tokens. With r = π_θ / π_old,
w = min(π_old / μ, mismatch_cap) and the advantage A of the token, the loss of a token is

    grpo, bnpo, dapo, dr_grpo   -w min(r A, clip(r) A); if A < 0, at most w dual_clip |A|
    gspo                        the same with one r for the whole sequence, exp of the mean of log r
    cispo                       -w clip(r) A log π_θ; only the last factor has a gradient
    ppo                         -min(r A, clip(r) A); r is at most ratio_cap here and in the next two
    importance_sampling         -r A, with r = π_θ / μ
    distillation                -r log(π_teacher / π_old), with r = π_θ / μ
    dpo                         -log σ(β Σ ±log(π_θ / π_base)), over both samples of a pair
    kto                         λ (1 - σ(±β (Σ log(π_θ / π_base) - z0))), over the tokens of a sample
    cross_entropy               -log π_θ

plus kl_coef · k3 - entropy_coef · H. k3 estimates the KL divergence from the base model, and H is the entropy.

A token's loss is multiplied by its weight. A reduction gives the factor of each sequence's sum of these; the products
add up to the loss of the update. The factors depend on totals of the whole update. So the sum over its micro-batches
is the same however the update is split, which a mean over micro-batches would not be.

To add a loss, add its name and defaults to `config.Algorithm` and `config.ALGORITHM_DEFAULTS`, and its functions to
`ALGORITHMS` below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.train.reductions import (
    Denominators,
    Reduction,
    length_constant,
    plain_sum,
    sequence_mean,
    token_mean,
)
from mlx_parallm.train.token_losses import (
    Objective,
    TokenBatch,
    TokenTerms,
    cispo,
    cross_entropy,
    distillation,
    dpo,
    importance_sampling,
    k3,
    kto,
    ppo,
    sequence_clip,
    token_clip,
)


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over the trained tokens of one micro-batch; lazy fp32 scalars.

    `kl`: k3 of the policy and the base model. `mismatch_kl`: k3 of μ and π_old. `preferred`: tokens of pairs in which
    the chosen sample is ahead, or of samples on their side of kto's z0. None: there is no data for it.
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
    preferred: mx.array | None

    def arrays(self) -> list[mx.array]:
        """The arrays that are not None, for `mx.eval`."""
        every = (getattr(self, field.name) for field in fields(self))
        return [array for array in every if array is not None]


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
    factors = rule.reduction(batch.weights, denominators, config)
    return ((per_token * batch.weights).sum(-1) * factors).sum(), _stats(batch, terms, kl)


def means(parts: Sequence[LossStats]) -> dict[str, float]:
    """Means over the trained tokens of all micro-batches: ratio_mean, clip_fraction, dual_clip_fraction, mismatch_kl,
    kl, entropy and preference_accuracy if known; and ratio_max, the largest ratio of any token."""
    columns = {
        "ratio_mean": [part.ratio for part in parts],
        "clip_fraction": [part.clipped for part in parts],
        "dual_clip_fraction": [part.dual_clipped for part in parts],
        "mismatch_kl": [part.mismatch_kl for part in parts],
        "kl": [part.kl for part in parts if part.kl is not None],
        "entropy": [part.entropy for part in parts if part.entropy is not None],
        "preference_accuracy": [part.preferred for part in parts if part.preferred is not None],
    }
    tokens = max(sum(float(part.tokens) for part in parts), 1.0)
    figures = {name: sum(map(float, column)) / tokens for name, column in columns.items() if column}
    return figures | {"ratio_max": max((float(part.ratio_max) for part in parts), default=0.0)}


def _trained_only(batch: TokenBatch) -> TokenBatch:
    """Puts zeros on padding. Masking only after an exp would give padding the gradient 0 · NaN."""
    keep = batch.weights > 0

    def kept(values: mx.array) -> mx.array:
        return mx.where(keep, values, 0.0)

    return TokenBatch(
        logp=kept(batch.logp),
        old_logp=mx.stop_gradient(kept(batch.old_logp)),
        sampling_logp=mx.stop_gradient(kept(batch.sampling_logp)),
        weights=batch.weights,
        advantages=mx.stop_gradient(kept(batch.advantages)),
        ref_logp=None if batch.ref_logp is None else mx.stop_gradient(kept(batch.ref_logp)),
        entropy=None if batch.entropy is None else kept(batch.entropy),
        groups=batch.groups,
        teacher_logp=None if batch.teacher_logp is None else mx.stop_gradient(kept(batch.teacher_logp)),
        kl_estimate=batch.kl_estimate,
    )


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
        preferred=None if terms.preferred is None else total(terms.preferred),
    )


ALGORITHMS: Mapping[Algorithm, LossRule] = {
    Algorithm.GRPO: LossRule(token_clip, sequence_mean),
    Algorithm.BNPO: LossRule(token_clip, token_mean),
    Algorithm.DAPO: LossRule(token_clip, token_mean),
    Algorithm.DR_GRPO: LossRule(token_clip, length_constant),
    Algorithm.GSPO: LossRule(sequence_clip, sequence_mean),
    Algorithm.CISPO: LossRule(cispo, token_mean),
    Algorithm.PPO: LossRule(ppo, plain_sum),
    Algorithm.IMPORTANCE_SAMPLING: LossRule(importance_sampling, plain_sum),
    Algorithm.DISTILLATION: LossRule(distillation, token_mean),
    Algorithm.DPO: LossRule(dpo, sequence_mean),
    Algorithm.KTO: LossRule(kto, sequence_mean),
    Algorithm.CROSS_ENTROPY: LossRule(cross_entropy, token_mean),
}
