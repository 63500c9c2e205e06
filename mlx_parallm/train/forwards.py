"""Losses of micro-batches and their gradients, for several policies in one pass.

A pass runs the trunk, which is the model without the logits, and then the head, which computes the logits, block by
block. A pass and its backward pass make a micro-step. The base model's weights are constants of the graph: only the
LoRA factors of the policies have gradients. Everything is lazy; the caller evaluates it, stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.config import OldLogprobs, ResolvedLoss
from mlx_parallm.train.context import Params, Span
from mlx_parallm.train.head import HeadBlocks, Scores, head_blocks
from mlx_parallm.train.losses import Figures, TokenBatch, UpdateTotals, loss
from mlx_parallm.train.model import TrainableModel, TrunkPass
from mlx_parallm.train.pacing import Stage, StageKind
from mlx_parallm.train.packing import MicroBatch
from mlx_parallm.train.policy import PolicyState


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
                Span(each.batch.tokens.size, factors, each.policy.scale)
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
        yield from (Stage(StageKind.HEAD_BACKWARD, block, block[0].shape[0]) for block in first)
        of_head = [leaf for each in gradients for leaf in each.get(self._model.head_path, {}).values()]
        yield Stage(StageKind.HEAD_BACKWARD, [last, of_head], last[0].shape[0])
        yield from forward.trunk.backward_stages(gradients)

    def scores(
        self,
        batches: Sequence[MicroBatch],
        spans: Sequence[Span] | None,
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

    def _head_spans(self, batches: Sequence[MicroBatch], spans: Sequence[Span]) -> Sequence[Span]:
        """The head's LoRA factors of the trained positions; none if no policy has any."""
        path = self._model.head_path
        if not any(path in span.params for span in spans):
            return ()
        return [
            Span(batch.targets.size, {path: span.params[path]} if path in span.params else {}, span.scale)
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
        groups=batch.groups,
        teacher_logp=batch.teacher_logprobs,
        kl_estimate=each.kl_estimate,
    )


def _sum(one: Params, other: Params) -> Params:
    return cast(Params, tree_map(mx.add, one, other))
