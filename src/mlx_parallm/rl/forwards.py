"""Losses of micro-batches and their gradients, those of several policies in one pass over the trunk and the head.

The base's weights appear in the graph as constants: only the factors of the policies' linears have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import mlx.core as mx

from mlx_parallm.rl.losses import Stats, TokenBatch, loss
from mlx_parallm.rl.pacing import Kind, Stage
from mlx_parallm.rl.packing import MicroBatch
from mlx_parallm.rl.reductions import Denominators
from mlx_parallm.rl.scores import token_scores
from mlx_parallm.rl.settings import OldLogprobs, TrainerSettings
from mlx_parallm.rl.trainable import Params, Span, TrainableModel

Scores = tuple[mx.array, mx.array]
"""Logprobs and entropies of a micro-batch's completion tokens, fp32 [N]."""


@dataclass(frozen=True, slots=True)
class Share:
    """One policy's part of a micro-step. `denominators`: of its own update."""

    batch: MicroBatch
    params: Params
    scale: float
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over trunk and head. `layers`: what each layer put out."""

    scores: list[Scores]
    layers: tuple[mx.array, ...]

    def stages(self, result: object) -> Iterator[Stage]:
        """In which `result`, made of the scores, is computed."""
        yield from (Stage(Kind.FORWARD, output) for output in self.layers)
        yield Stage(Kind.HEAD, result)


@dataclass(frozen=True, slots=True)
class SharePart:
    """What a micro-step adds to one update. `logprobs`: fp32 [N], of its tokens under the policy as it is."""

    loss: mx.array
    stats: Stats
    logprobs: mx.array
    gradients: Params


@dataclass(frozen=True, slots=True)
class Gradients:
    """`parts`: of each share. `stages`: of all before the gradients."""

    parts: list[SharePart]
    stages: list[Stage]


class Forwards:
    """Device thread only. All is lazy: whoever reads it evaluates it."""

    def __init__(self, model: TrainableModel, settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings

    def gradients(self, shares: Sequence[Share]) -> Gradients:
        """Of each share what it would have alone."""
        batches = [share.batch for share in shares]
        references, before = self._references(batches)

        def objective(params: list[Params]) -> tuple[mx.array, tuple[Pass, list[tuple[mx.array, Stats]]]]:
            pairs = zip(shares, params, strict=True)
            passed = self.scores(batches, [Span(share.batch.tokens.size, each, share.scale) for share, each in pairs])
            losses = [
                loss(self._tokens(share.batch, scores, reference), share.denominators, self._settings.loss)
                for share, scores, reference in zip(shares, passed.scores, references, strict=True)
            ]
            return mx.stack([value for value, _ in losses]).sum(), (passed, losses)

        (_, (passed, losses)), gradients = mx.value_and_grad(objective)([share.params for share in shares])
        logprobs = [mx.stop_gradient(logp) for logp, _ in passed.scores]
        parts = [
            SharePart(value, stats, logp, each)
            for (value, stats), logp, each in zip(losses, logprobs, gradients, strict=True)
        ]
        results = [[part.loss, part.stats.arrays(), part.logprobs] for part in parts]
        return Gradients(parts, [*before, *passed.stages(results)])

    def scores(self, batches: Sequence[MicroBatch], spans: Sequence[Span] | None) -> Pass:
        """Of each micro-batch, all in one pass, under the factors of `spans`; None: under the base."""
        lies = tuple(chain(*(batch.lies for batch in batches)))
        hidden, layers = self._model.hidden(mx.concatenate([batch.tokens for batch in batches]), lies, spans)
        starts = accumulate((batch.tokens.size for batch in batches), initial=0)
        positions = [batch.positions + start for batch, start in zip(batches, starts, strict=False)]
        logp, entropy = token_scores(
            self._model.logits,
            hidden[mx.concatenate(positions)],
            mx.concatenate([batch.targets for batch in batches]),
            mx.concatenate([batch.temperatures for batch in batches]),
            self._settings.loss.entropy_coef != 0.0,
        )
        stops = accumulate((batch.targets.size for batch in batches), initial=0)
        return Pass([(logp[start:stop], entropy[start:stop]) for start, stop in pairwise(stops)], layers)

    def reference(self, batches: Sequence[MicroBatch]) -> tuple[list[mx.array], list[Stage]]:
        """Logprobs under the base, [B, C]: slot 0 is the same model without factors. And their stages."""
        passed = self.scores(batches, None)
        found = [mx.stop_gradient(batch.padded(logp)) for batch, (logp, _) in zip(batches, passed.scores, strict=True)]
        return found, list(passed.stages(found))

    def _references(self, batches: Sequence[MicroBatch]) -> tuple[Sequence[mx.array | None], list[Stage]]:
        return self.reference(batches) if self._settings.loss.kl_coef else ([None] * len(batches), [])

    def _tokens(self, batch: MicroBatch, scores: Scores, reference: mx.array | None) -> TokenBatch:
        """π_old and μ by the rule of `LossSettings.old_logprobs`; a row without μ has the trainer's own for both."""
        logp, entropy = map(batch.padded, scores)
        now = mx.stop_gradient(logp)
        sampler = mx.where(batch.known, batch.sampling_logprobs, now)
        trainers = self._settings.loss.old_logprobs is OldLogprobs.TRAINER
        old = mx.where(batch.on_policy, now, sampler) if trainers else sampler
        return TokenBatch(
            logp=logp,
            old_logp=old,
            sampling_logp=sampler,
            ref_logp=reference,
            entropy=entropy,
            mask=batch.mask,
            advantages=batch.advantages,
        )
