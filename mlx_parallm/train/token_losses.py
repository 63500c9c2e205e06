"""The loss of each token, as pure functions of logprobs. The formulas are in `losses`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_parallm.config import ResolvedLoss

MOST_LOG_RATIO = 20.0
"""Log ratios are clipped here, so that no exp overflows. Beyond it they have no gradient."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch of B sequences; C is the most trained tokens of one. Logprobs and entropy are in nats.

    `logp`: of π_θ. `old_logp`: of π_old. `sampling_logp`: of μ. `ref_logp`: of the base model. `entropy`: of π_θ.
    `teacher_logp`: of the policy that distillation imitates. `kl_estimate`: kto's z0.
    `weights`: above 0 on trained tokens, 0 on padding, where the other arrays may hold anything, even NaN. All these
    are fp32 [B, C]. Only `logp` and `entropy` get gradients. `groups`: 1 where a row belongs to a group, fp32 [G, B].
    """

    logp: mx.array
    old_logp: mx.array
    sampling_logp: mx.array
    weights: mx.array
    advantages: mx.array
    ref_logp: mx.array | None = None
    entropy: mx.array | None = None
    groups: mx.array | None = None
    teacher_logp: mx.array | None = None
    kl_estimate: float = 0.0

    @property
    def mask(self) -> mx.array:
        """1 on trained tokens, 0 on padding."""
        return (self.weights > 0).astype(mx.float32)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The policy loss of each token, and the ratio in it; [B, C] or [B, 1].

    `clipped`, `dual_clipped`: whether that clip applies, so that the token has no gradient. With cispo, and where it is
    ratio_cap that applies, it has one.
    `preferred`: 1 where the row's pair is in the right order, or the row is on its side of kto's z0.
    """

    policy: mx.array
    ratio: mx.array
    clipped: mx.array
    dual_clipped: mx.array
    preferred: mx.array | None = None


Objective = Callable[[TokenBatch, ResolvedLoss], TokenTerms]


def k3(logp: mx.array, reference: mx.array) -> mx.array:
    """Estimate of KL(p ‖ reference) at each token that p drew: expm1(δ) - δ with δ = reference - logp; at least 0."""
    delta = mx.minimum(reference - logp, MOST_LOG_RATIO)
    return mx.expm1(delta) - delta


def token_clip(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    return _clipped_objective(batch, _ratio(batch.logp - batch.old_logp), config)


def sequence_clip(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """GSPO (arXiv 2507.18071): every token has the ratio of its sequence, and that ratio's gradient."""
    change = ((batch.logp - batch.old_logp) * batch.mask).sum(-1, keepdims=True)
    tokens = mx.maximum(batch.mask.sum(-1, keepdims=True), 1.0)
    return _clipped_objective(batch, _ratio(change / tokens), config)


def _clipped_objective(batch: TokenBatch, ratio: mx.array, config: ResolvedLoss) -> TokenTerms:
    """The clipped objective of PPO (arXiv 1707.06347), a lower bound of the unclipped one.

    For a negative advantage it decreases with the ratio without limit, so a single token that became much more likely
    since it was drawn could dominate the update. Dual-clip PPO (arXiv 1912.09729) stops it at dual_clip · A.
    """
    bound, clipped = _clipped(batch, ratio, config)
    floor = mx.where(batch.advantages < 0, config.dual_clip * batch.advantages, -mx.inf)
    weights = _mismatch_weights(batch, config)
    return TokenTerms(-weights * mx.maximum(bound, floor), ratio, clipped, bound < floor)


def _clipped(batch: TokenBatch, ratio: mx.array, config: ResolvedLoss) -> tuple[mx.array, mx.array]:
    """min(r A, clip(r) A), and where the second is the smaller one."""
    unclipped = ratio * batch.advantages
    clipped = mx.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * batch.advantages
    return mx.minimum(unclipped, clipped), clipped < unclipped


def cispo(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """CISPO (arXiv 2506.13585): the ratio is a bounded weight without a gradient, so every token keeps its gradient."""
    ratio = _ratio(batch.logp - batch.old_logp)
    bounded = mx.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    weights = mx.stop_gradient(bounded) * _mismatch_weights(batch, config)
    return TokenTerms(-weights * batch.advantages * batch.logp, ratio, bounded != ratio, mx.zeros_like(ratio))


def ppo(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """The objective of PPO, bounded by ratio_cap only, without mismatch weights."""
    ratio = _ratio(batch.logp - batch.old_logp)
    bound, clipped = _clipped(batch, _capped(ratio, config), config)
    return TokenTerms(-bound, ratio, clipped, mx.zeros_like(ratio))


def importance_sampling(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """The policy gradient, corrected for the policy that sampled the token: its gradient is that of A log π_θ times
    π_θ / μ, of which the latter is at most ratio_cap (truncated importance sampling, Ionides 2008)."""
    ratio = _ratio(batch.logp - batch.sampling_logp)
    none = mx.zeros_like(ratio)
    return TokenTerms(-_capped(ratio, config) * batch.advantages, ratio, ratio > config.ratio_cap, none)


def distillation(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """Reverse KL from a teacher, at the tokens that the policy drew (on-policy distillation, arXiv 2306.13649): the
    advantage of a token is how much likelier the teacher finds it than the policy did.

    Raises:
        ValueError: the batch lacks the teacher's logprobs.
    """
    if batch.teacher_logp is None:
        raise ValueError("distillation needs samples with teacher_logprobs")
    return importance_sampling(replace(batch, advantages=batch.teacher_logp - batch.old_logp), config)


def dpo(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """Direct preference optimisation (arXiv 2305.18290): -log σ(β Σ ±log(π_θ / π_base)).

    The sign is + for the chosen sample of a pair and - for the rejected one, whose advantage is negative. Both rows
    have the loss of their pair.

    Raises:
        ValueError: the batch lacks the logprobs of the base model, or its groups.
    """
    if batch.ref_logp is None or batch.groups is None:
        raise ValueError("dpo needs the logprobs of the base model, and the groups of the rows")
    signs, change = _signed_change(batch, batch.ref_logp)
    margins = batch.groups @ (signs * change)
    of_pairs = mx.logaddexp(mx.zeros_like(margins), -config.preference_beta * margins)
    ratio = _ratio(batch.logp - batch.old_logp)
    none = mx.zeros_like(ratio)
    in_order = batch.groups.T @ (margins > 0).astype(mx.float32)
    return TokenTerms((batch.groups.T @ of_pairs)[:, None], ratio, none, none, in_order[:, None])


def kto(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): λ (1 - σ(±β (Σ log(π_θ / π_base) - z0))).

    The sign is + for a desirable sample, whose advantages are positive, and - for an undesirable one, and λ is the
    weight of its kind. z0, `kl_estimate`, has no gradient.

    Raises:
        ValueError: the batch lacks the logprobs of the base model.
    """
    if batch.ref_logp is None:
        raise ValueError("kto needs the logprobs of the base model")
    signs, change = _signed_change(batch, batch.ref_logp)
    ahead = signs * (change - batch.kl_estimate)
    weights = mx.where(signs > 0, config.kto_desirable_weight, config.kto_undesirable_weight)
    of_rows = weights * mx.sigmoid(-config.preference_beta * ahead)
    ratio = _ratio(batch.logp - batch.old_logp)
    none = mx.zeros_like(ratio)
    return TokenTerms(of_rows[:, None], ratio, none, none, (ahead > 0).astype(mx.float32)[:, None])


def _signed_change(batch: TokenBatch, reference: mx.array) -> tuple[mx.array, mx.array]:
    """Of each row, the sign of its advantages, and Σ log(π_θ / π_base), [B]."""
    signs = mx.sign((batch.advantages * batch.mask).sum(-1))
    return signs, ((batch.logp - reference) * batch.weights).sum(-1)


def cross_entropy(batch: TokenBatch, config: ResolvedLoss) -> TokenTerms:
    """Imitation: advantages, ratios and the sampler are not used."""
    ratio = _ratio(batch.logp - batch.old_logp)
    return TokenTerms(-batch.logp, ratio, mx.zeros_like(ratio), mx.zeros_like(ratio))


def _capped(ratio: mx.array, config: ResolvedLoss) -> mx.array:
    """min(ratio, ratio_cap), whose gradient is that of the logprob times this value: a token keeps its gradient."""
    return ratio * mx.stop_gradient(mx.minimum(1.0, config.ratio_cap / ratio))


def _mismatch_weights(batch: TokenBatch, config: ResolvedLoss) -> mx.array:
    """min(π_old / μ, mismatch_cap) at each token, [B, C]; exactly 1 if the two are equal."""
    return mx.minimum(_ratio(batch.old_logp - batch.sampling_logp), config.mismatch_cap)


def _ratio(log_ratio: mx.array) -> mx.array:
    return mx.exp(mx.minimum(log_ratio, MOST_LOG_RATIO))
