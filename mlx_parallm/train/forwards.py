"""Losses of micro-batches and their gradients, for several policies in one pass.

A pass runs the trunk, which is the model without the logits, and then the head, which computes the logits, block by
block. A pass and its backward pass make a micro-step. The base model's weights are constants of the graph: only the
LoRA factors of the policies have gradients. Everything is lazy; the caller evaluates it, stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.batch.distributions import exp, row_sum
from mlx_parallm.config import OldLogprobs, ResolvedLoss
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.losses import Figures, TokenBatch, UpdateTotals, loss
from mlx_parallm.train.model import TrainableModel, TrunkPass
from mlx_parallm.train.pacing import Stage, StageKind
from mlx_parallm.train.packing import MicroBatch
from mlx_parallm.train.policy import PolicyState

Scores = tuple[mx.array, mx.array]
"""Logprobs and entropies of the trained tokens of a micro-batch, fp32 [N], in nats."""


@dataclass(frozen=True, slots=True)
class MicroStepInput:
    """One policy's part of a micro-step.

    loss: the settings of its loss. totals: those of the update.
    gradients: the sum of its gradients so far; None in the first micro-step.
    kl_estimate: see `Accumulation`.
    """

    batch: MicroBatch
    policy: PolicyState
    loss: ResolvedLoss
    totals: UpdateTotals
    gradients: Params | None
    kl_estimate: float = 0.0


@dataclass(frozen=True, slots=True)
class MicroStepResult:
    """The result of a micro-step for one policy.

    loss, sums: see `losses.loss`.
    logprobs: of the trained tokens under the policy before the update, fp32 [N].
    gradients: those of the input plus those of this micro-step. MLX adds in place if nothing else refers to the arrays
        of the input.
    """

    loss: mx.array
    sums: Figures
    logprobs: mx.array
    gradients: Params


@dataclass(frozen=True, slots=True)
class MicroStep:
    """`results`: one for each input, in order. `stages`: what computes them, in order."""

    results: list[MicroStepResult]
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class ScoredPass:
    """One pass over trunk and head. `scores`: one pair for each micro-batch. `blocks`: the scores of each block of
    positions."""

    scores: list[Scores]
    trunk: TrunkPass
    blocks: HeadBlocks

    def stages(self, result: object) -> Iterator[Stage]:
        """The stages that compute `result`, which depends on the scores."""
        yield from self.trunk.forward_stages()
        *first, last = self.blocks.scores
        yield from (Stage(StageKind.HEAD, block, block[0].size) for block in first)
        yield Stage(StageKind.HEAD, [last, result], last[0].size)


class TrainingForwards:
    """The forward and backward passes of micro-steps. Device thread only."""

    def __init__(self, model: TrainableModel) -> None:
        self._model = model

    def gradients(self, inputs: Sequence[MicroStepInput]) -> MicroStep:
        """Computes losses and gradients. Those of a policy are the same as if it were alone in the micro-step."""
        batches = [each.batch for each in inputs]
        references, stages = self._references(inputs)
        entropy_gradient = any(each.loss.entropy_coef for each in inputs)

        def objective(params: list[Params]) -> tuple[mx.array, tuple[ScoredPass, list[tuple[mx.array, Figures]]]]:
            spans = [
                LoraSpan(each.batch.tokens.size, factors, each.policy.scale)
                for each, factors in zip(inputs, params, strict=True)
            ]
            forward = self.scores(batches, spans, entropy_gradient, learns=True)
            losses = [
                loss(_token_batch(each, scores, reference), each.totals, each.loss)
                for each, scores, reference in zip(inputs, forward.scores, references, strict=True)
            ]
            return mx.stack([value for value, _ in losses]).sum(), (forward, losses)

        (_, (forward, losses)), gradients = mx.value_and_grad(objective)([each.policy.params for each in inputs])
        logprobs = [mx.stop_gradient(logp) for logp, _ in forward.scores]
        results = [
            MicroStepResult(value, sums, logp, new if each.gradients is None else _sum(each.gradients, new))
            for each, (value, sums), logp, new in zip(inputs, losses, logprobs, gradients, strict=True)
        ]
        arrays = [[each.loss, each.sums, each.logprobs] for each in results]
        backward = self._backward(forward, [each.gradients for each in results])
        return MicroStep(results, [*stages, *forward.stages(arrays), *backward])

    def _backward(self, forward: ScoredPass, gradients: Sequence[Params]) -> Iterator[Stage]:
        """The stages of the backward pass: one for each block of the head, then one for the gradients of each layer,
        from the last layer to the first."""
        *first, last = forward.blocks.gradients
        forward.blocks.gradients.clear()  # the graph of the backward pass holds this list, and so would hold itself
        yield from (Stage(StageKind.HEAD_BACKWARD, block, block[0].shape[0]) for block in first)
        of_head = [leaf for each in gradients for leaf in each.get(self._model.head_path, {}).values()]
        yield Stage(StageKind.HEAD_BACKWARD, [last, of_head], last[0].shape[0])
        yield from forward.trunk.backward_stages(gradients)

    def scores(
        self,
        batches: Sequence[MicroBatch],
        spans: Sequence[LoraSpan] | None,
        entropy_gradient: bool = False,
        learns: bool = False,
    ) -> ScoredPass:
        """The scores of all micro-batches, in one pass. `spans`: the tokens' LoRA factors; None: the base model.
        `entropy_gradient`: whether the entropies have a gradient. `learns`: see `TrainableModel.trunk`."""
        tokens, branches = mx.concatenate([batch.tokens for batch in batches]), [batch.branch for batch in batches]
        trunk = self._model.trunk(tokens, branches, spans, learns)
        starts = accumulate((batch.tokens.size for batch in batches), initial=0)
        positions = [batch.positions + start for batch, start in zip(batches, starts, strict=False)]
        blocks = head_blocks(
            self._model.logits,
            trunk.hidden[mx.concatenate(positions)],
            mx.concatenate([batch.targets for batch in batches]),
            mx.concatenate([batch.temperatures for batch in batches]),
            self._head_spans(batches, spans or ()),
            entropy_gradient,
        )
        logp, entropy = blocks.joined()
        stops = accumulate((batch.targets.size for batch in batches), initial=0)
        return ScoredPass([(logp[start:stop], entropy[start:stop]) for start, stop in pairwise(stops)], trunk, blocks)

    def _head_spans(self, batches: Sequence[MicroBatch], spans: Sequence[LoraSpan]) -> Sequence[LoraSpan]:
        """The head's LoRA factors of the trained positions; none if no policy has any."""
        path = self._model.head_path
        if not any(path in span.params for span in spans):
            return ()
        return [
            LoraSpan(batch.targets.size, {path: span.params[path]} if path in span.params else {}, span.scale)
            for batch, span in zip(batches, spans, strict=True)
        ]

    def reference(self, batches: Sequence[MicroBatch]) -> tuple[list[mx.array], list[Stage]]:
        """Logprobs under the base model, [B, C] for each micro-batch, and the stages that compute them."""
        forward = self.scores(batches, None)
        logprobs = [
            mx.stop_gradient(batch.padded(logp)) for batch, (logp, _) in zip(batches, forward.scores, strict=True)
        ]
        return logprobs, list(forward.stages(logprobs))

    def _references(self, inputs: Sequence[MicroStepInput]) -> tuple[Sequence[mx.array | None], list[Stage]]:
        """The reference logprobs of each input whose loss reads them, and the stages that compute them: none for those
        that the samples bring, and a pass of the base model for the others."""
        given = [each.batch.reference_logprobs if each.loss.reads_reference else None for each in inputs]
        missing = [
            at for at, each in enumerate(inputs) if each.loss.reads_reference and each.batch.reference_logprobs is None
        ]
        if not missing:
            return given, []
        computed, stages = self.reference([inputs[at].batch for at in missing])
        for at, logprobs in zip(missing, computed, strict=True):
            given[at] = logprobs
        return given, stages


def _token_batch(each: MicroStepInput, scores: Scores, reference: mx.array | None) -> TokenBatch:
    """The arrays for the loss.

    `sampling_logp`: under μ, the policy that sampled the tokens. `old_logp`: under μ too or, if `config.OldLogprobs` is
    TRAINER and the row is on-policy, under the policy before the update. A row without sampling logprobs uses the
    trainer's own for both.
    """
    batch = each.batch
    logp, entropy = map(batch.padded, scores)
    before = mx.stop_gradient(logp) if batch.old_logprobs is None else batch.old_logprobs
    sampler = mx.where(batch.known, batch.sampling_logprobs, before)
    trainers = each.loss.old_logprobs is OldLogprobs.TRAINER
    return TokenBatch(
        logp=logp,
        old_logp=mx.where(batch.on_policy, before, sampler) if trainers else sampler,
        sampling_logp=sampler,
        ref_logp=reference,
        entropy=entropy,
        weights=batch.weights,
        advantages=batch.advantages,
        shares=batch.shares,
        loss_scales=batch.loss_scales,
        groups=batch.groups,
        teacher_logp=batch.teacher_logprobs,
        kl_estimate=each.kl_estimate,
    )


def _sum(one: Params, other: Params) -> Params:
    return cast(Params, tree_map(mx.add, one, other))


# -- the head ------------------------------------------------------------------------------------
#
# Logprobs come from a fused cross-entropy that keeps no logits: its backward pass computes them again and uses the
# closed-form gradient of softmax. So only the logits of one block of positions, [n, V], are in memory at a time.
#
# The head's own LoRA factors, if there are any, are arguments of the fused function, because MLX gives gradients only
# to arguments. Their gradient is that of logits → (hidden states, factors), applied to the gradient of the logits.

Head = Callable[[mx.array, Sequence[LoraSpan]], mx.array]
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
    spans: Sequence[LoraSpan],
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
    head: Head, spans: Sequence[LoraSpan], entropy_gradient: bool, gradients: list[list[mx.array]]
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


def _within(spans: Sequence[LoraSpan], start: int, stop: int) -> Iterator[LoraSpan]:
    """The parts of the spans that lie in the positions [start, stop)."""
    ends = accumulate(span.tokens for span in spans)
    for span, end in zip(spans, ends, strict=True):
        tokens = min(end, stop) - max(end - span.tokens, start)
        if tokens > 0:
            yield replace(span, tokens=tokens)


def _leaves(spans: Sequence[LoraSpan]) -> list[mx.array]:
    """The factors of all spans, in order."""
    return [leaf for span in spans for pair in span.params.values() for leaf in (pair["a"], pair["b"])]


def _with_leaves(spans: Sequence[LoraSpan], leaves: Iterable[mx.array]) -> list[LoraSpan]:
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
