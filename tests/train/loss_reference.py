"""Every objective again, in float64, token by token, over ragged rows: no padding, no masks, no autodiff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.train.data import Datum
from mlx_parallm.train.losses import TokenBatch, UpdateTotals, loss


@dataclass(frozen=True)
class Row:
    """One sequence; arrays [T], of values that float32 holds exactly."""

    logp: np.ndarray
    old: np.ndarray
    mu: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    advantage: float | np.ndarray
    group: int
    token_weights: np.ndarray | None = None
    share: float = 1.0
    loss_scale: float = 1.0

    @property
    def advantages(self) -> np.ndarray:
        return np.broadcast_to(np.float64(self.advantage), self.logp.shape)

    @property
    def weights(self) -> np.ndarray:
        return np.ones(len(self.logp)) if self.token_weights is None else self.token_weights


def row(rng: np.random.Generator, tokens: int, log_ratio: tuple[float, float], advantage: float, group: int = 0) -> Row:
    """Log ratios π/π_old drawn from the range; π_old/μ on both sides of 2, base and policy a little apart."""
    old = rng.uniform(-3, -0.5, tokens)
    arrays = {
        "logp": old + rng.uniform(*log_ratio, tokens),
        "old": old,
        "mu": old + rng.uniform(-1.2, 0.6, tokens),
        "ref": old + rng.uniform(-0.8, 0.8, tokens),
        "entropy": rng.uniform(0.1, 2, tokens),
    }
    exact = {name: values.astype(np.float32).astype(np.float64) for name, values in arrays.items()}
    return Row(**exact, advantage=advantage, group=group)


def mixed_rows(seed: int = 0) -> list[Row]:
    """Seven rows of three groups, lengths 1 to 9, both signs, ratios in and out of every clip range. Two of them are
    parts of one episode."""
    rng = np.random.default_rng(seed)
    lengths, groups = (3, 1, 9, 4, 6, 2, 5), (0, 0, 1, 1, 1, 2, 2)
    signs = (1.0, -0.5, 0.75, -1.5, 0.25, -1.0, 1.0)
    rows = [row(rng, n, (-1.0, 1.0), a, g) for n, g, a in zip(lengths, groups, signs, strict=True)]
    rows[3], rows[4] = replace(rows[3], share=0.4), replace(rows[4], share=0.6)
    return rows


def uneven_rows(seed: int = 0) -> list[Row]:
    """The same rows, with advantages of both signs and weights of 0.25 to 2 within each."""
    rng = np.random.default_rng(seed + 1)
    return [
        replace(
            each,
            advantage=rng.integers(-8, 8, each.logp.size) / 4,
            token_weights=rng.integers(1, 8, each.logp.size) / 4,
        )
        for each in mixed_rows(seed)
    ]


def reference_loss(rows: Sequence[Row], settings: ResolvedLoss, frozen: Sequence[Row] | None = None) -> float:
    """`frozen`: where factors without a gradient are taken; the rows themselves if not given."""
    total = 0.0
    for each, still in zip(rows, frozen or rows, strict=True):
        values = [
            each.loss_scale * _policy(each, still, t, settings)
            + settings.kl_coef * _k3(each.ref[t] - each.logp[t])
            - settings.entropy_coef * each.entropy[t]
            for t in range(len(each.logp))
        ]
        total += float(np.dot(values, each.weights)) * _weight(rows, each, settings)
    return float(total)


def reference_gradient(rows: Sequence[Row], settings: ResolvedLoss, step: float = 1e-6) -> list[np.ndarray]:
    """d loss / d logp of each row, by central differences of `reference_loss`."""
    slopes = [np.zeros(len(each.logp)) for each in rows]
    for i, each in enumerate(rows):
        for t in range(len(each.logp)):
            around = []
            for sign in (1, -1):
                moved = each.logp.copy()
                moved[t] += sign * step
                there = [*rows[:i], replace(each, logp=moved), *rows[i + 1 :]]
                around.append(reference_loss(there, settings, frozen=rows))
            slopes[i][t] = (around[0] - around[1]) / (2 * step)
    return slopes


def _weight(rows: Sequence[Row], each: Row, settings: ResolvedLoss) -> float:
    if settings.algorithm in (Algorithm.PPO, Algorithm.IMPORTANCE_SAMPLING):
        return 1.0
    lengths = {id(r): r.weights.sum() for r in rows}
    episodes = sum(r.share for r in rows)
    if settings.algorithm in (Algorithm.GRPO, Algorithm.GSPO):
        return each.share / episodes / lengths[id(each)]
    if settings.algorithm is Algorithm.DR_GRPO:
        return 1 / episodes / settings.max_completion_tokens
    return 1 / sum(lengths.values())


def _policy(each: Row, frozen: Row, t: int, settings: ResolvedLoss) -> float:
    if settings.algorithm is Algorithm.CROSS_ENTROPY:
        return -each.logp[t]
    a = each.advantages[t]
    if settings.algorithm is Algorithm.IMPORTANCE_SAMPLING:
        return -_below_cap(each.logp[t] - each.mu[t], frozen.logp[t] - frozen.mu[t], settings) * a
    w = min(np.exp(each.old[t] - each.mu[t]), settings.mismatch_cap)
    if settings.algorithm is Algorithm.CISPO:
        r = np.exp(frozen.logp[t] - frozen.old[t])
        return -w * min(max(r, 1 - settings.clip_low), 1 + settings.clip_high) * a * each.logp[t]
    r = _clip_ratio(each, t, settings)
    if settings.algorithm is Algorithm.PPO:
        r = _below_cap(each.logp[t] - each.old[t], frozen.logp[t] - frozen.old[t], settings)
    clipped = min(max(r, 1 - settings.clip_low), 1 + settings.clip_high)
    bound = min(r * a, clipped * a)
    if settings.algorithm is Algorithm.PPO:
        return -bound
    if a < 0:
        bound = max(bound, settings.dual_clip * a)
    return -w * bound


def _below_cap(log_ratio: float, still: float, settings: ResolvedLoss) -> float:
    """min(r, cap), which moves as r does: `still` is where the log ratio is cut off."""
    return float(min(np.exp(still), settings.ratio_cap) * np.exp(log_ratio - still))


def _clip_ratio(each: Row, t: int, settings: ResolvedLoss) -> float:
    if settings.algorithm is Algorithm.GSPO:
        return float(np.exp(np.mean(each.logp - each.old)))
    return float(np.exp(each.logp[t] - each.old[t]))


def _k3(delta: float) -> float:
    return float(np.expm1(delta) - delta)


@dataclass(frozen=True)
class Padding:
    """`extra` places beyond the longest row, on one side, holding `fill`."""

    extra: int = 0
    left: bool = False
    fill: float = float("nan")


def samples(rows: Sequence[Row]) -> list[Datum]:
    """The rows as samples, for the totals of an update. A row without tokens gets one, which the totals do not see if
    the row is not in the update."""
    return [
        Datum(
            (1, *[2] * max(r.logp.size, 1)),
            (0.0, *(r.weights.tolist() or [1.0])),
            (0.0, *(r.advantages.tolist() or [0.0])),
            group=r.group,
            share=r.share,
        )
        for r in rows
    ]


def token_batch(rows: Sequence[Row], padding: Padding = Padding()) -> TokenBatch:
    width = max(len(r.logp) for r in rows) + padding.extra

    def padded(arrays: Sequence[np.ndarray], fill: float) -> mx.array:
        blanks = [np.full(width - len(a), fill) for a in arrays]
        pairs = zip(arrays, blanks, strict=True)
        whole = [np.concatenate([blank, a] if padding.left else [a, blank]) for a, blank in pairs]
        return mx.array(np.stack(whole).astype(np.float32))

    return TokenBatch(
        logp=padded([r.logp for r in rows], padding.fill),
        old_logp=padded([r.old for r in rows], padding.fill),
        sampling_logp=padded([r.mu for r in rows], padding.fill),
        weights=padded([r.weights for r in rows], 0.0),
        advantages=padded([r.advantages for r in rows], padding.fill),
        shares=mx.array([r.share for r in rows], mx.float32),
        loss_scales=mx.array([r.loss_scale for r in rows], mx.float32),
        ref_logp=padded([r.ref for r in rows], padding.fill),
        entropy=padded([r.entropy for r in rows], padding.fill),
    )


def totals_of(rows: Sequence[Row]) -> UpdateTotals:
    """Those of an update of these rows."""
    return UpdateTotals.of(samples(rows))


def computed(
    rows: Sequence[Row], settings: ResolvedLoss, whole: Sequence[Row] | None = None, padding: Padding = Padding()
) -> tuple[float, list[np.ndarray]]:
    """Ours: the loss of these rows as a micro-batch of `whole`, and d loss / d logp of each row."""
    batch = token_batch(rows, padding)
    totals = totals_of(whole or rows)
    value, gradient = mx.value_and_grad(lambda x: loss(replace(batch, logp=x), totals, settings)[0])(batch.logp)
    slopes, trained = np.array(gradient), np.array(batch.mask) > 0
    assert not slopes[~trained].any(), "padding has a gradient, or it is not finite"
    return value.item(), [line[mask] for line, mask in zip(slopes, trained, strict=True)]
