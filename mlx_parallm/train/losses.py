"""The losses of an update, as pure functions of logprobs.

π_θ is the policy in training, π_old the one before the update, μ the one that sampled the tokens. With r = π_θ / π_old,
w = min(π_old / μ, mismatch_cap) and the advantage A of the token, the loss of a token is

    grpo, bnpo, dapo, dr_grpo   -w min(r A, clip(r) A); if A < 0, at most w dual_clip |A|
    gspo                        the same with one r for the whole sequence, exp of the mean of log r
    cispo                       -w clip(r) A log π_θ; only the last factor has a gradient
    ppo                         -min(r A, clip(r) A); r is at most ratio_cap here and in the next two
    importance_sampling         -r A, with r = π_θ / μ
    distillation                -r log(π_teacher / π_old), with r = π_θ / μ
    dpo                         -log σ(β Σ ±log(π_θ / π_base)), over both answers of a pair
    kto                         λ (1 - σ(±β (Σ log(π_θ / π_base) - z0))), over the tokens of an answer
    cross_entropy               -log π_θ

times the `loss_scale` of its sample, plus kl_coef · k3 - entropy_coef · H. k3 estimates the KL divergence from the base
model, and H is the entropy.

A token's loss is multiplied by its weight. A reduction gives the factor of each sequence's sum of these; the products
add up to the loss of the update. The factors depend on totals of the whole update. So the sum over its micro-batches
is the same however the update is split, which a mean over micro-batches would not be.

To add a loss, add its name, kind and defaults to `config.loss.Algorithm`, and its function and reduction to `LOSSES` at
the end of this file. The advantages of its data depend on its kind (`rl.objectives.prepare`). The recipe in
docs/contributing.md names the tests and pages. The losses of Tinker's clients, which come with each request, are in
`core.summed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import mlx.core as mx

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.train.data import Datum

MOST_LOG_RATIO = 20.0
"""Log ratios are clipped here, so that no exp overflows. Beyond it they have no gradient."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch of B sequences; C is the most trained tokens of one. Logprobs and entropy are in nats.

    `logp`: of π_θ. `old_logp`: of π_old. `sampling_logp`: of μ. `ref_logp`: of the base model. `entropy`: of π_θ.
    `teacher_logp`: of the policy that distillation imitates. `kl_estimate`: kto's z0.
    `weights`: above 0 on trained tokens, 0 on padding, where the other arrays may hold anything, even NaN. All these
    are fp32 [B, C]. Only `logp` and `entropy` get gradients. `groups`: 1 where a row belongs to a group, fp32 [G, B].
    `shares`: the part of its episode that each row is, fp32 [B]. `loss_scales`: what the loss of each row is multiplied
    by, without its KL divergence and entropy, fp32 [B].
    """

    logp: mx.array
    old_logp: mx.array
    sampling_logp: mx.array
    weights: mx.array
    advantages: mx.array
    shares: mx.array
    loss_scales: mx.array
    ref_logp: mx.array | None = None
    entropy: mx.array | None = None
    groups: mx.array | None = None
    teacher_logp: mx.array | None = None
    kl_estimate: float = 0.0

    @property
    def mask(self) -> mx.array:
        """1 on trained tokens, 0 on padding."""
        return (self.weights > 0).astype(mx.float32)

    def trained_only(self) -> TokenBatch:
        """This batch with zeros on padding. Masking only after an exp would give padding the gradient 0 · NaN."""
        keep = self.weights > 0

        def constant(values: mx.array) -> mx.array:
            return mx.stop_gradient(mx.where(keep, values, 0.0))

        return replace(
            self,
            logp=mx.where(keep, self.logp, 0.0),
            old_logp=constant(self.old_logp),
            sampling_logp=constant(self.sampling_logp),
            advantages=constant(self.advantages),
            ref_logp=None if self.ref_logp is None else constant(self.ref_logp),
            entropy=None if self.entropy is None else mx.where(keep, self.entropy, 0.0),
            teacher_logp=None if self.teacher_logp is None else constant(self.teacher_logp),
        )


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update: the number of its sequences N, and the weight of all its tokens ΣT_i.

    The weight is the number of tokens if each has the weight 1. An episode counts as one sequence, also if it is split
    into several data.
    """

    sequences: float
    weight: float

    @classmethod
    def of(cls, data: Sequence[Datum]) -> UpdateTotals:
        """`data`: all that the update trains on."""
        return cls(fsum(datum.share for datum in data), fsum(datum.weight for datum in data))


Figures = dict[str, mx.array]
"""By name: figures of each token, [B, C] or [B, 1]; or their sums over the trained tokens of a micro-batch."""

Objective = Callable[[TokenBatch, ResolvedLoss], tuple[mx.array, Figures]]
"""→ the loss of each token, [B, C] or [B, 1], and figures of its own: those that `loss` names, in place of the usual
ones, or others."""

Reduction = Callable[[TokenBatch, UpdateTotals, ResolvedLoss], mx.array]
"""→ the factors of the rows' sums, [B] or [1]."""


def loss(batch: TokenBatch, totals: UpdateTotals, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """The part of the update's loss that comes from one micro-batch, fp32 scalar. The parts add up to the loss.

    Returns:
        The loss, and lazy fp32 sums over the trained tokens: `tokens`, their number; `ratio_mean`, of the policy ratio;
        `ratio_max`, the largest one, which is no sum; `clip_fraction` and `dual_clip_fraction`, tokens for which that
        clip applies, so that they have no gradient (with cispo, and where it is ratio_cap that applies, they have one);
        `mismatch_kl`, k3 of μ and π_old; `preference_accuracy`, tokens of pairs in the right order, or of answers on
        their side of kto's z0; `kl`, k3 of π_θ and the base model; `entropy`. The last three only if they are known.

    Raises:
        ValueError: `kl_coef` or `entropy_coef` is set, and the batch lacks the array that it needs.
    """
    objective, reduction = LOSSES[config.algorithm]
    batch = batch.trained_only()
    mask = batch.mask
    per_token, own = objective(batch, config)
    per_token = per_token * batch.loss_scales[:, None]
    figures = {"clip_fraction": mx.zeros(1), "dual_clip_fraction": mx.zeros(1)} | own
    figures.setdefault("ratio_mean", _ratio(batch.logp - batch.old_logp))
    figures["mismatch_kl"] = k3(batch.sampling_logp, batch.old_logp)
    if batch.ref_logp is not None:
        figures["kl"] = k3(batch.logp, batch.ref_logp)
    if batch.entropy is not None:
        figures["entropy"] = batch.entropy
    for name, weight in (("kl", config.kl_coef), ("entropy", -config.entropy_coef)):
        if weight:
            if name not in figures:
                raise ValueError(f"{name}_coef is set, and the batch lacks the array for it")
            per_token = per_token + weight * figures[name]
    sums = {name: mx.stop_gradient((values * mask).sum()) for name, values in figures.items()}
    sums |= {"tokens": mask.sum(), "ratio_max": mx.stop_gradient((figures["ratio_mean"] * mask).max())}
    return ((per_token * batch.weights).sum(-1) * reduction(batch, totals, config)).sum(), sums


def means(parts: Sequence[Figures]) -> dict[str, float]:
    """The means over the trained tokens of all micro-batches, from the sums that `loss` gives of each; and ratio_max,
    the largest ratio of any token."""
    tokens = max(sum(float(part["tokens"]) for part in parts), 1.0)
    names = dict.fromkeys(name for part in parts for name in part if name not in ("tokens", "ratio_max"))
    figures = {name: sum(float(part[name]) for part in parts if name in part) / tokens for name in names}
    return figures | {"ratio_max": max((float(part["ratio_max"]) for part in parts), default=0.0)}


def k3(logp: mx.array, reference: mx.array) -> mx.array:
    """Estimate of KL(p ‖ reference) at each token that p sampled: expm1(δ) - δ with δ = reference - logp; at least
    0."""
    delta = mx.minimum(reference - logp, MOST_LOG_RATIO)
    return mx.expm1(delta) - delta


# -- the losses of tokens ------------------------------------------------------------------------


def token_clip(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    return _clipped_objective(batch, _ratio(batch.logp - batch.old_logp), config)


def sequence_clip(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """GSPO (arXiv 2507.18071): every token has the ratio of its sequence, and that ratio's gradient."""
    mask = batch.mask
    change = ((batch.logp - batch.old_logp) * mask).sum(-1, keepdims=True)
    tokens = mx.maximum(mask.sum(-1, keepdims=True), 1.0)
    return _clipped_objective(batch, _ratio(change / tokens), config)


def _clipped_objective(batch: TokenBatch, ratio: mx.array, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """The clipped objective of PPO (arXiv 1707.06347), a lower bound of the unclipped one.

    For a negative advantage it decreases with the ratio without limit, so a single token that became much more likely
    since it was sampled could dominate the update. Dual-clip PPO (arXiv 1912.09729) stops it at dual_clip · A.
    """
    bound, clipped = _clipped(batch, ratio, config)
    floor = mx.where(batch.advantages < 0, config.dual_clip * batch.advantages, -mx.inf)
    figures = {"ratio_mean": ratio, "clip_fraction": clipped, "dual_clip_fraction": bound < floor}
    return -_mismatch_weights(batch, config) * mx.maximum(bound, floor), figures


def _clipped(batch: TokenBatch, ratio: mx.array, config: ResolvedLoss) -> tuple[mx.array, mx.array]:
    """min(r A, clip(r) A), and where the second is the smaller one."""
    unclipped = ratio * batch.advantages
    clipped = mx.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * batch.advantages
    return mx.minimum(unclipped, clipped), clipped < unclipped


def cispo(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """CISPO (arXiv 2506.13585): the ratio is a bounded weight without a gradient, so every token keeps its gradient."""
    ratio = _ratio(batch.logp - batch.old_logp)
    bounded = mx.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    weights = mx.stop_gradient(bounded) * _mismatch_weights(batch, config)
    return -weights * batch.advantages * batch.logp, {"ratio_mean": ratio, "clip_fraction": bounded != ratio}


def ppo(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """The objective of PPO, bounded by ratio_cap only, without mismatch weights."""
    ratio = _ratio(batch.logp - batch.old_logp)
    bound, clipped = _clipped(batch, _capped(ratio, config), config)
    return -bound, {"ratio_mean": ratio, "clip_fraction": clipped}


def importance_sampling(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """The policy gradient, corrected for the policy that sampled the token: its gradient is that of A log π_θ times
    π_θ / μ, of which the latter is at most ratio_cap (truncated importance sampling, Ionides 2008)."""
    ratio = _ratio(batch.logp - batch.sampling_logp)
    figures = {"ratio_mean": ratio, "clip_fraction": ratio > config.ratio_cap}
    return -_capped(ratio, config) * batch.advantages, figures


def distillation(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """Reverse KL from a teacher, at the tokens that the policy sampled (on-policy distillation, arXiv 2306.13649): the
    advantage of a token is how much likelier the teacher finds it than the policy did.

    Raises:
        ValueError: the batch lacks the teacher's logprobs.
    """
    if batch.teacher_logp is None:
        raise ValueError("distillation needs samples with teacher_logprobs")
    return importance_sampling(replace(batch, advantages=batch.teacher_logp - batch.old_logp), config)


def dpo(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """Direct preference optimisation (arXiv 2305.18290): -log σ(β Σ ±log(π_θ / π_base)).

    The sign is + for the chosen answer of a pair and - for the rejected one, whose advantage is negative. Both rows
    have the loss of their pair.

    Raises:
        ValueError: the batch lacks the logprobs of the base model, or its groups.
    """
    if batch.ref_logp is None or batch.groups is None:
        raise ValueError("dpo needs the logprobs of the base model, and the groups of the rows")
    signs, change = _signed_change(batch, batch.ref_logp)
    margins = batch.groups @ (signs * change)
    of_pairs = mx.logaddexp(mx.zeros_like(margins), -config.preference_beta * margins)
    in_order = batch.groups.T @ (margins > 0).astype(mx.float32)
    return (batch.groups.T @ of_pairs)[:, None], {"preference_accuracy": in_order[:, None]}


def kto(batch: TokenBatch, config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): λ (1 - σ(±β (Σ log(π_θ / π_base) - z0))).

    The sign is + for a desirable answer, whose advantages are positive, and - for an undesirable one, and λ is the
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
    return of_rows[:, None], {"preference_accuracy": (ahead > 0).astype(mx.float32)[:, None]}


def _signed_change(batch: TokenBatch, reference: mx.array) -> tuple[mx.array, mx.array]:
    """Of each row, the sign of its advantages, and Σ log(π_θ / π_base), [B]."""
    signs = mx.sign((batch.advantages * batch.mask).sum(-1))
    return signs, ((batch.logp - reference) * batch.weights).sum(-1)


def cross_entropy(batch: TokenBatch, _config: ResolvedLoss) -> tuple[mx.array, Figures]:
    """Imitation: advantages, ratios and the sampler are not used."""
    return -batch.logp, {}


def _capped(ratio: mx.array, config: ResolvedLoss) -> mx.array:
    """min(ratio, ratio_cap), whose gradient is that of the logprob times this value: a token keeps its gradient."""
    return ratio * mx.stop_gradient(mx.minimum(1.0, config.ratio_cap / ratio))


def _mismatch_weights(batch: TokenBatch, config: ResolvedLoss) -> mx.array:
    """min(π_old / μ, mismatch_cap) at each token, [B, C]; exactly 1 if the two are equal."""
    return mx.minimum(_ratio(batch.old_logp - batch.sampling_logp), config.mismatch_cap)


def _ratio(log_ratio: mx.array) -> mx.array:
    return mx.exp(mx.minimum(log_ratio, MOST_LOG_RATIO))


# -- reductions ----------------------------------------------------------------------------------


def sequence_mean(batch: TokenBatch, totals: UpdateTotals, _config: ResolvedLoss) -> mx.array:
    """Mean over episodes of the mean over their tokens: share / (N T_i). The shares of an episode's data are those of
    its tokens, so that it does not matter into how many it is split."""
    lengths = batch.weights.sum(-1)
    return batch.shares / (mx.where(lengths > 0, lengths, 1.0) * (totals.sequences or 1.0))


def token_mean(_batch: TokenBatch, totals: UpdateTotals, _config: ResolvedLoss) -> mx.array:
    """Mean over all tokens of the update: 1 / ΣT_i."""
    return mx.array([1.0 / (totals.weight or 1.0)])


def length_constant(_batch: TokenBatch, totals: UpdateTotals, config: ResolvedLoss) -> mx.array:
    """1 / (N L_max): the weight of a token does not depend on the length of its sequence."""
    return mx.array([1.0 / ((totals.sequences or 1.0) * config.max_completion_tokens)])


def plain_sum(_batch: TokenBatch, _totals: UpdateTotals, _config: ResolvedLoss) -> mx.array:
    """The sum over all tokens: the caller has put every normalisation into weights and advantages."""
    return mx.array([1.0])


LOSSES: Mapping[Algorithm, tuple[Objective, Reduction]] = {
    Algorithm.GRPO: (token_clip, sequence_mean),
    Algorithm.BNPO: (token_clip, token_mean),
    Algorithm.DAPO: (token_clip, token_mean),
    Algorithm.DR_GRPO: (token_clip, length_constant),
    Algorithm.GSPO: (sequence_clip, sequence_mean),
    Algorithm.CISPO: (cispo, token_mean),
    Algorithm.PPO: (ppo, plain_sum),
    Algorithm.IMPORTANCE_SAMPLING: (importance_sampling, plain_sum),
    Algorithm.DISTILLATION: (distillation, token_mean),
    Algorithm.DPO: (dpo, sequence_mean),
    Algorithm.KTO: (kto, sequence_mean),
    Algorithm.CROSS_ENTROPY: (cross_entropy, token_mean),
}
"""The loss of the tokens of each algorithm, and how these are combined."""
