"""Logprobs and entropies of trained tokens, from the hidden states that predict them.

Logprobs come from a fused cross-entropy that keeps no logits: its backward pass computes them again and uses the
closed-form gradient of softmax. So only the logits of one block of positions, [n, V], are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from mlx_parallm.batch.rowwise import exp, row_sum

Scores = tuple[mx.array, mx.array]
"""Logprobs and entropies of the trained tokens of a micro-batch, fp32 [N], in nats."""

Head = Callable[[mx.array], mx.array]
"""Hidden states [n, D] → logits [n, V]."""

HEAD_BLOCK = 256
"""Positions whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """`scores`: of each block of positions. `gradients`: of its hidden states, fp32 [n, D], in the order in which the
    backward pass was made; empty before that."""

    scores: list[Scores] = field(default_factory=list)
    gradients: list[mx.array] = field(default_factory=list)

    def joined(self) -> Scores:
        logprobs, entropies = zip(*self.scores, strict=True)
        return mx.concatenate(list(logprobs)), mx.concatenate(list(entropies))


def head_blocks(
    head: Head, hidden: mx.array, targets: mx.array, temperatures: mx.array, entropy_gradient: bool
) -> HeadBlocks:
    """Logprob of each target, and entropy of each distribution softmax(logits / temperature), in nats, block by block.

    Args:
        head: its weights get no gradient.
        hidden: [N, D].
        targets: int [N].
        temperatures: fp32 [N], above 0.
        entropy_gradient: whether the entropies have a gradient.
    """
    blocks = HeadBlocks()
    block = _block_scores(head, entropy_gradient, blocks.gradients)
    blocks.scores.extend(
        block(
            hidden[start : start + HEAD_BLOCK],
            targets[start : start + HEAD_BLOCK],
            temperatures[start : start + HEAD_BLOCK],
        )
        for start in range(0, hidden.shape[0], HEAD_BLOCK)
    )
    return blocks


def _block_scores(head: Head, entropy_gradient: bool, gradients: list[mx.array]) -> Callable[..., Scores]:
    """Scores of one block. Its backward pass appends the gradient of the hidden states to `gradients`."""

    @mx.custom_function
    def scores(hidden: mx.array, targets: mx.array, temperatures: mx.array) -> Scores:
        scaled, weights, normaliser = _softmax(head(hidden), temperatures)
        chosen = mx.take_along_axis(scaled, targets[:, None], -1)
        mean = row_sum(weights * scaled) / row_sum(weights)
        return (chosen - normaliser).squeeze(-1), (normaliser - mean).squeeze(-1)

    @scores.vjp
    def gradient(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, mx.array, mx.array]:
        hidden, targets, temperatures = primals
        upstream, upstream_entropy = cotangents
        logits = head(hidden)
        scaled, weights, normaliser = _softmax(logits, temperatures)
        probabilities = weights / row_sum(weights)
        # d logp / d z = onehot - p;  d H / d z = -p (log p + H)
        slope = -upstream[:, None] * probabilities
        slope = slope.at[mx.arange(targets.size), targets].add(upstream)
        if entropy_gradient:
            surprise = scaled - normaliser + outputs[1][:, None]
            slope = slope - upstream_entropy[:, None] * probabilities * surprise
        slope = (slope / temperatures[:, None]).astype(logits.dtype)
        _, (into_hidden,) = mx.vjp(head, [hidden], [slope])
        gradients.append(into_hidden)
        return into_hidden, mx.zeros_like(targets), mx.zeros_like(temperatures)

    return cast(Callable[..., Scores], scores)


def _softmax(logits: mx.array, temperatures: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns z = logits / temperature minus its maximum [n, V], exp z [n, V], and log Σ exp z [n, 1].

    Sums are computed by blocks, as in the sampler: a plain float32 sum over a vocabulary has an error of 1e-4.
    """
    scaled = logits.astype(mx.float32) / temperatures[:, None]
    scaled = scaled - scaled.max(-1, keepdims=True)
    weights = exp(scaled)
    return scaled, weights, mx.log(row_sum(weights))
