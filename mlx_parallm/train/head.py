"""Logprobs and entropies of trained tokens, from the hidden states that predict them.

Logprobs come from a fused cross-entropy that keeps no logits: its backward pass computes them again and uses the
closed-form gradient of softmax. So only the logits of one block of positions, [n, V], are in memory at a time.

The head's own LoRA factors, if there are any, are arguments of the fused function, because MLX gives gradients only to
arguments. Their gradient is that of logits → (hidden states, factors), applied to the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlx_parallm.batch.distributions import exp, row_sum
from mlx_parallm.train.context import Span

Scores = tuple[mx.array, mx.array]
"""Logprobs and entropies of the trained tokens of a micro-batch, fp32 [N], in nats."""

Head = Callable[[mx.array, Sequence[Span]], mx.array]
"""Hidden states [n, D], with the LoRA factors of their positions → logits [n, V]. No spans: the base model."""

HEAD_BLOCK = 256
"""Positions whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """`scores`: of each block of positions. `gradients`: of its hidden states, [n, D], and of the head's factors, in
    the order in which the backward pass was made; empty before that."""

    scores: list[Scores] = field(default_factory=list)
    gradients: list[list[mx.array]] = field(default_factory=list)

    def joined(self) -> Scores:
        logprobs, entropies = zip(*self.scores, strict=True)
        return mx.concatenate(list(logprobs)), mx.concatenate(list(entropies))


def head_blocks(
    head: Head,
    hidden: mx.array,
    targets: mx.array,
    temperatures: mx.array,
    spans: Sequence[Span],
    entropy_gradient: bool,
) -> HeadBlocks:
    """Logprob of each target, and entropy of each distribution softmax(logits / temperature), in nats, block by block.

    Args:
        head: its base weights get no gradient.
        hidden: [N, D].
        targets: int [N].
        temperatures: fp32 [N], above 0.
        spans: the head's LoRA factors, which get gradients, for the N positions in order; none: it has none.
        entropy_gradient: whether the entropies have a gradient.
    """
    blocks = HeadBlocks()
    starts = range(0, len(hidden), HEAD_BLOCK)
    for start, *arrays in zip(
        starts, *(mx.split(each, starts[1:]) for each in (hidden, targets, temperatures)), strict=True
    ):
        inside = list(_within(spans, start, start + HEAD_BLOCK))
        block = _block_scores(head, inside, entropy_gradient, blocks.gradients)
        blocks.scores.append(block(*arrays, *_leaves(inside)))
    return blocks


def _block_scores(
    head: Head, spans: Sequence[Span], entropy_gradient: bool, gradients: list[list[mx.array]]
) -> Callable[..., Scores]:
    """Scores of one block. Its last arguments are the leaves of `spans`, whose own arrays are not used. Its backward
    pass appends the gradients of the hidden states and of these leaves to `gradients`."""

    def logits_of(hidden: mx.array, *leaves: mx.array) -> mx.array:
        return head(hidden, _with_leaves(spans, leaves))

    @mx.custom_function
    def scores(hidden: mx.array, targets: mx.array, temperatures: mx.array, *leaves: mx.array) -> Scores:
        scaled, weights, normaliser = _softmax(logits_of(hidden, *leaves), temperatures)
        chosen = mx.take_along_axis(scaled, targets[:, None], -1)
        mean = row_sum(weights * scaled) / row_sum(weights)
        return (chosen - normaliser).squeeze(-1), (normaliser - mean).squeeze(-1)

    @scores.vjp
    def gradient(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        hidden, targets, temperatures, *leaves = primals
        upstream, upstream_entropy = cotangents
        logits = logits_of(hidden, *leaves)
        scaled, weights, normaliser = _softmax(logits, temperatures)
        probabilities = weights / row_sum(weights)
        # d logp / d z = onehot - p;  d H / d z = -p (log p + H)
        slope = -upstream[:, None] * probabilities
        slope = slope.at[mx.arange(targets.size), targets].add(upstream)
        if entropy_gradient:
            surprise = scaled - normaliser + outputs[1][:, None]
            slope = slope - upstream_entropy[:, None] * probabilities * surprise
        slope = (slope / temperatures[:, None]).astype(logits.dtype)
        _, slopes = mx.vjp(logits_of, [hidden, *leaves], [slope])
        gradients.append(slopes)
        return slopes[0], mx.zeros_like(targets), mx.zeros_like(temperatures), *slopes[1:]

    return cast(Callable[..., Scores], scores)


def _within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """The parts of the spans that lie in the positions [start, stop)."""
    ends = accumulate(span.tokens for span in spans)
    for span, end in zip(spans, ends, strict=True):
        tokens = min(end, stop) - max(end - span.tokens, start)
        if tokens > 0:
            yield replace(span, tokens=tokens)


def _leaves(spans: Sequence[Span]) -> list[mx.array]:
    """The factors of all spans, in order."""
    return [leaf for span in spans for pair in span.params.values() for leaf in (pair["a"], pair["b"])]


def _with_leaves(spans: Sequence[Span], leaves: Iterable[mx.array]) -> list[Span]:
    """The spans with other factors, in the order of `_leaves`."""
    rest = iter(leaves)
    return [replace(span, params={path: {"a": next(rest), "b": next(rest)} for path in span.params}) for span in spans]


def _softmax(logits: mx.array, temperatures: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns z = logits / temperature minus its maximum [n, V], exp z [n, V], and log Σ exp z [n, 1].

    Sums are computed by blocks, as in the sampler: a plain float32 sum over a vocabulary has an error of 1e-4.
    """
    scaled = logits.astype(mx.float32) / temperatures[:, None]
    scaled = scaled - scaled.max(-1, keepdims=True)
    weights = exp(scaled)
    return scaled, weights, mx.log(row_sum(weights))
