"""Logprobs of given tokens from hidden states: a fused cross-entropy that keeps no logits.

The backward pass computes the logits again and knows the softmax's gradient in closed form, so [n, V] arrays of one
block of positions are all that is ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_parallm.batch.rowwise import exp, row_sum

Head = Callable[[mx.array], mx.array]

_BLOCK = 256
"""Positions whose logits are in memory together."""


def token_scores(
    head: Head, hidden: mx.array, targets: mx.array, temperatures: mx.array, entropy_gradient: bool
) -> tuple[mx.array, mx.array]:
    """Logprob of each target, and the entropy of each distribution, at softmax(logits / temperature).

    Args:
        head: hidden states [n, D] → logits [n, V]; its weights get no gradient.
        hidden: [N, D].
        targets: int [N].
        temperatures: fp32 [N], > 0.
        entropy_gradient: whether entropies have a gradient; else they are a figure only.

    Returns:
        Both fp32 [N], nats.
    """
    block = _block_scores(head, entropy_gradient)
    parts = [
        block(hidden[start : start + _BLOCK], targets[start : start + _BLOCK], temperatures[start : start + _BLOCK])
        for start in range(0, hidden.shape[0], _BLOCK)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return mx.concatenate(list(logprobs)), mx.concatenate(list(entropies))


def _block_scores(head: Head, entropy_gradient: bool) -> Callable[..., tuple[mx.array, mx.array]]:
    @mx.custom_function
    def scores(hidden: mx.array, targets: mx.array, temperatures: mx.array) -> tuple[mx.array, mx.array]:
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
        return into_hidden, mx.zeros_like(targets), mx.zeros_like(temperatures)

    return cast(Callable[..., tuple[mx.array, mx.array]], scores)


def _softmax(logits: mx.array, temperatures: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """logits / temperature less its maximum, its exponential, and the logarithm of its sum: [n, V], [n, V], [n, 1].

    Summed by blocks, as the sampler does: a plain float32 sum over a vocabulary is off by 1e-4.
    """
    scaled = logits.astype(mx.float32) / temperatures[:, None]
    scaled = scaled - scaled.max(-1, keepdims=True)
    weights = exp(scaled)
    return scaled, weights, mx.log(row_sum(weights))
