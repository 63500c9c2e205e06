"""Accumulation: the gradients of one batch of samples, collected from micro-steps.

sample batches ─▶ micro-steps ─▶ gradients, losses, statistics ─▶ (KL from the base model) ─▶ a sum that steps use
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.config import LossKind, ResolvedLoss
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, check_pairs, mismatched
from mlx_parallm.train.forwards import MicroStepResult
from mlx_parallm.train.logprobs import Logprobs
from mlx_parallm.train.losses import Figures, UpdateTotals, means
from mlx_parallm.train.packing import MicroBatch, SampleBatch, pack, split_samples
from mlx_parallm.train.policy import Policy

_KL_SAMPLING, _KL_TOKENS = 4, 256
"""One in this many batches, of at most so many tokens, is compared with the base model."""


class Accumulation:
    """Splits its samples into batches, and adds up their gradients.

    The split depends on these samples alone, whatever else shares the micro-steps. Nothing of the policy changes, so
    one that fails or is abandoned needs no undoing.

    Attributes:
        needs: work without which it is not done.
        loss: the settings of the loss.
        totals: what the loss is divided by.
        batches: all sample batches. `pending`: those that no micro-step has taken yet.
        mismatched: prompts with answers to others, which the KL estimate of kto is made from.
        kl_estimate: kto's z0, in nats of a whole answer, at least 0; None until it is computed. It is that of these
            samples alone: a step that is accumulated in several calls has one for each of them.
        gradients: their sum so far; None before the first micro-step.
        logprobs: of each batch's trained tokens under the policy before the step, fp32 [N].
        base_kls: mean KL of each sampled batch between the policy before the step and the base model.
        device_seconds: its share of the time of the units that worked on it.
        future: completed by the trainer with its contribution, or with StepFailedError.

    Args:
        max_tokens: most tokens of a batch. A single sample may have more.
        totals: those of the samples that the step will have seen in the end, if there are more than these.
        before: logprobs of these samples under the policy before the first step of the update; None: it is before its
            first step.
        returns_logprobs: whether the contribution has the logprobs, in place of the KL divergence from the base model,
            which takes a further pass.
        needs: other work without which this is not done.

    Raises:
        ValueError: the loss compares pairs, and a group is not one; it reads a teacher that a sample does not have; or
            only some samples have reference_logprobs, or any with kto, whose KL estimate needs the base model's.
    """

    def __init__(
        self,
        policy: Policy,
        samples: Sequence[Datum],
        loss: ResolvedLoss,
        max_tokens: int,
        totals: UpdateTotals | None = None,
        before: Logprobs | None = None,
        needs: Sequence[object] = (),
        returns_logprobs: bool = False,
    ) -> None:
        self.policy = policy
        self._samples = samples
        self.returns_logprobs = returns_logprobs
        self.needs = needs if before is None else (before, *needs)
        self._before = before
        self._max_tokens = max_tokens
        self.loss = loss
        self.totals = totals or UpdateTotals.of(samples)
        if loss.kind is LossKind.PAIRWISE:
            check_pairs(samples)
        if loss.reads_teacher and not all(sample.teacher_logprobs for sample in samples):
            raise ValueError("distillation needs teacher_logprobs in every sample")
        referenced = sum(bool(sample.reference_logprobs) for sample in samples)
        if loss.reads_reference and 0 < referenced < len(samples):
            raise ValueError("give reference_logprobs with each of the samples, or with none of them")
        if loss.kind is LossKind.KTO and referenced:
            raise ValueError("kto compares with the base model: leave reference_logprobs out")
        self.batches = tuple(split_samples(samples, max_tokens, whole_groups=loss.kind is LossKind.PAIRWISE))
        self.pending = list(self.batches)
        self.mismatched = tuple(split_samples(mismatched(samples), max_tokens)) if loss.kind is LossKind.KTO else ()
        self.kl_estimate = None if loss.kind is LossKind.KTO else 0.0
        self.gradients: Params | None = None
        self.logprobs: dict[SampleBatch, mx.array] = {}
        self.base_kls: list[float] = []
        self.device_seconds = 0.0
        self.future: Future[Contribution] = Future()
        self.losses: list[mx.array] = []
        self.stats: list[Figures] = []

    @property
    def trained_tokens(self) -> int:
        return sum(batch.trained_tokens for batch in self.batches)

    def take(self, max_tokens: float) -> SampleBatch | None:
        """Takes the first pending batch of at most `max_tokens` tokens. Returns None if there is none."""
        for batch in self.pending:
            if batch.size <= max_tokens:
                self.pending.remove(batch)
                return batch
        return None

    def add(self, batch: SampleBatch, result: MicroStepResult) -> None:
        """Keeps the result of a micro-step, whose arrays are not evaluated yet."""
        self.gradients = result.gradients
        self.logprobs[batch] = result.logprobs
        self.losses.append(result.loss)
        self.stats.append(result.sums)

    def contribution(self) -> Contribution:
        """What it adds, once its micro-steps are done."""
        of_sample: dict[int, tuple[float, ...]] = {}
        if self.returns_logprobs:
            for batch, logprobs in self.logprobs.items():
                values = iter(cast(list[float], logprobs.tolist()))
                for sample in batch.samples:
                    of_sample[id(sample)] = tuple(next(values) for _ in sample.trained())
        logprobs_in_order = tuple(of_sample[id(sample)] for sample in self._samples) if of_sample else ()
        return Contribution(Accumulated({}, [self]).metrics(), logprobs_in_order)

    def packed(self, batch: SampleBatch) -> MicroBatch:
        """The arrays of one of the batches."""
        return pack(batch, None if self._before is None else self._before.of(batch.samples))

    def old_logprobs(self, batch: SampleBatch) -> mx.array:
        """Of a batch's trained tokens, under the policy before the update, fp32 [N]."""
        if self._before is not None:
            return mx.array([value for each in self._before.of(batch.samples) for value in each])
        if batch in self.logprobs:
            return self.logprobs[batch]
        return mx.concatenate([self._logprobs_of_sample[id(sample)] for sample in batch.samples])

    @cached_property
    def _logprobs_of_sample(self) -> dict[int, mx.array]:
        """Those of each sample's trained tokens, once all micro-steps are done."""
        of_sample: dict[int, mx.array] = {}
        for batch, logprobs in self.logprobs.items():
            start = 0
            for sample in batch.samples:
                stop = start + len(sample.trained())
                of_sample[id(sample)], start = logprobs[start:stop], stop
        return of_sample

    @cached_property
    def _small_batches(self) -> list[SampleBatch]:
        samples = [sample for batch in self.batches for sample in batch.samples]
        return list(split_samples(samples, min(self._max_tokens, _KL_TOKENS)))

    def sampled_batches(self) -> list[SampleBatch]:
        """About a quarter of the samples in batches of their own, at least one batch, drawn so that the mean of their
        means is an unbiased estimate of the mean over all tokens. They may be smaller than those of micro-steps.

        Systematic sampling with probability proportional to size (Madow 1949): from a random first token on, evenly
        spaced tokens are picked. The batch of each picked token is taken, so a batch may come twice. The number of the
        policy's step is the seed, so that a replayed update picks the same batches.
        """
        batches = self._small_batches
        ends = list(accumulate(batch.trained_tokens for batch in batches))
        picks = math.ceil(len(ends) / _KL_SAMPLING)
        start = random.Random(self.policy.state.step).random()
        return [batches[bisect(ends, (start + at) / picks * ends[-1])] for at in range(picks)]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What some samples add to the gradients of a step: their metrics and, if that was asked for, the logprobs in nats
    of each sample's trained tokens, in the order of the samples, under the policy before the step."""

    metrics: dict[str, float]
    logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(slots=True)
class Accumulated:
    """What a policy has accumulated since its last step. `gradients`: the sum over all `parts`."""

    gradients: Params
    parts: list[Accumulation] = field(default_factory=list)

    @classmethod
    def of(cls, part: Accumulation, before: Accumulated | None) -> Accumulated:
        """What there is after a further part, whose gradients are taken from it, and added up in place."""
        gradients, part.gradients = cast(Params, part.gradients), None
        if before is None:
            return cls(gradients, [part])
        summed = cast(Params, tree_map(mx.add, before.gradients, gradients))
        del gradients  # MLX adds in place if nothing else refers to them
        mx.eval(summed)
        return cls(summed, [*before.parts, part])

    @property
    def loss(self) -> float:
        return sum(cast(float, value.item()) for part in self.parts for value in part.losses)

    @property
    def trained_tokens(self) -> int:
        return sum(part.trained_tokens for part in self.parts)

    def metrics(self) -> dict[str, float]:
        """Means over all trained tokens, and the sums `loss`, `tokens` and `device_seconds`. The KL from the base model
        is an estimate if it is not part of the loss. `kl_mismatched` is kto's z0."""
        figures = means([stats for part in self.parts for stats in part.stats])
        if any(part.base_kls for part in self.parts):
            kls = (
                part.trained_tokens * sum(part.base_kls) / len(part.base_kls) for part in self.parts if part.base_kls
            )
            figures["kl"] = sum(kls) / sum(part.trained_tokens for part in self.parts if part.base_kls)
        if estimates := [part.kl_estimate or 0.0 for part in self.parts if part.loss.kind is LossKind.KTO]:
            figures["kl_mismatched"] = sum(estimates) / len(estimates)
        return {
            **figures,
            "loss": self.loss,
            "tokens": float(self.trained_tokens),
            "device_seconds": sum(part.device_seconds for part in self.parts),
        }
