"""Accumulation: the gradients of some samples, collected from micro-steps; and the sum of them that a step uses.

sample batches ─▶ micro-steps ─▶ gradients, losses, figures ─▶ (KL from the base model) ─▶ Accumulated
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx.optimizers import clip_grad_norm
from mlx.utils import tree_map

from mlx_parallm.config import LossKind, ResolvedLoss
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, check_pairs, mismatched
from mlx_parallm.train.forwards import MicroStepResult
from mlx_parallm.train.losses import Figures, UpdateTotals, means
from mlx_parallm.train.packing import MicroBatch, SampleBatch, pack, split_samples
from mlx_parallm.train.policy import Policy

_KL_SAMPLING, _KL_TOKENS = 4, 256
"""One in this many batches, of at most so many tokens, is compared with another policy."""

SampleLogprobs = Mapping[int, tuple[float, ...]]
"""By the id of a sample: the logprobs of its trained tokens, in nats."""


def of_samples(batch: SampleBatch, logprobs: mx.array) -> SampleLogprobs:
    """The logprobs of a batch's trained tokens, fp32 [N], by sample."""
    values = iter(cast(list[float], logprobs.tolist()))
    return {id(sample): tuple(next(values) for _ in sample.trained()) for sample in batch.samples}


class Accumulation:
    """Splits its samples into batches, and adds up their gradients.

    The split depends on these samples alone, whatever else shares the micro-steps. Nothing of the policy changes, so
    one that fails or is abandoned needs no undoing.

    Attributes:
        loss: the settings of the loss.
        totals: what the loss is divided by.
        pending: the sample batches that no micro-step has taken yet.
        mismatched: prompts with answers to others, which the KL estimate of kto is made from.
        kl_estimate: kto's z0, in nats of a whole answer, at least 0. It is that of these samples alone: a step that is
            accumulated in several calls has one for each of them.
        before: logprobs of these samples under the policy before the first step of the update; None: it is before its
            first step.
        gradients: their sum so far; None before the first micro-step.
        losses, sums: of each micro-step; see `losses.loss`.
        logprobs: of each batch's trained tokens under the policy before the step, fp32 [N].
        base_kl: KL divergence of the policy before the step from the base model, in nats per token; None: it was not
            measured.
        device_seconds: of the job that asked for it.

    Args:
        max_tokens: most tokens of a batch. A single sample may have more.
        totals: those of the samples that the step will have seen in the end, if there are more than these.
        returns_logprobs: whether the contribution has the logprobs, in place of the KL divergence from the base model,
            which takes a further pass.

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
        returns_logprobs: bool = False,
    ) -> None:
        _check(samples, loss)
        self.policy = policy
        self.loss = loss
        self.totals = totals or UpdateTotals.of(samples)
        self.returns_logprobs = returns_logprobs
        self.pending = list(split_samples(samples, max_tokens, whole_groups=loss.kind is LossKind.PAIRWISE))
        self.mismatched = tuple(split_samples(mismatched(samples), max_tokens)) if loss.kind is LossKind.KTO else ()
        self.kl_estimate = 0.0
        self.before: SampleLogprobs | None = None
        self.gradients: Params | None = None
        self.losses: list[mx.array] = []
        self.sums: list[Figures] = []
        self.logprobs: dict[SampleBatch, mx.array] = {}
        self.base_kl: float | None = None
        self.device_seconds = 0.0
        self._samples = samples
        self._max_tokens = max_tokens

    @property
    def trained_tokens(self) -> int:
        return sum(len(sample.trained()) for sample in self._samples)

    def take(self, max_tokens: float) -> SampleBatch | None:
        """Takes the first pending batch of at most `max_tokens` tokens. Returns None if there is none."""
        for batch in self.pending:
            if batch.size <= max_tokens:
                self.pending.remove(batch)
                return batch
        return None

    def packed(self, batch: SampleBatch) -> MicroBatch:
        """The arrays of one of the batches."""
        before = self.before
        return pack(batch, None if before is None else [before[id(sample)] for sample in batch.samples])

    def add(self, batch: SampleBatch, result: MicroStepResult) -> None:
        """Keeps the result of a micro-step, whose arrays are not evaluated yet."""
        self.gradients = result.gradients
        self.logprobs[batch] = result.logprobs
        self.losses.append(result.loss)
        self.sums.append(result.sums)

    @cached_property
    def _sample_logprobs(self) -> SampleLogprobs:
        """Under the policy before the step, once all micro-steps are done."""
        return {at: values for each in self.logprobs.items() for at, values in of_samples(*each).items()}

    def old_logprobs(self, batch: SampleBatch) -> mx.array:
        """Of a batch's trained tokens, under the policy before the update, fp32 [N]."""
        known = self._sample_logprobs if self.before is None else self.before
        return mx.array([value for sample in batch.samples for value in known[id(sample)]])

    def contribution(self) -> Contribution:
        """What it adds, once its micro-steps are done."""
        known = self._sample_logprobs if self.returns_logprobs else {}
        logprobs = tuple(known[id(sample)] for sample in self._samples) if known else ()
        return Contribution(metrics([self]), logprobs)

    @cached_property
    def _small_batches(self) -> list[SampleBatch]:
        return list(split_samples(self._samples, min(self._max_tokens, _KL_TOKENS)))

    def sampled_batches(self) -> list[SampleBatch]:
        """About a quarter of the samples in batches of their own, at least one batch, chosen so that the mean of their
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


def _check(samples: Sequence[Datum], loss: ResolvedLoss) -> None:
    """Raises ValueError: see `Accumulation`."""
    if loss.kind is LossKind.PAIRWISE:
        check_pairs(samples)
    if loss.reads_teacher and not all(sample.teacher_logprobs for sample in samples):
        raise ValueError("distillation needs teacher_logprobs in every sample")
    referenced = sum(bool(sample.reference_logprobs) for sample in samples)
    if loss.reads_reference and 0 < referenced < len(samples):
        raise ValueError("give reference_logprobs with each of the samples, or with none of them")
    if loss.kind is LossKind.KTO and referenced:
        raise ValueError("kto compares with the base model: leave reference_logprobs out")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What some samples add to the gradients of a step: their metrics and, if that was asked for, the logprobs in nats
    of each sample's trained tokens, in the order of the samples, under the policy before the step."""

    metrics: dict[str, float]
    logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(slots=True)
class Accumulated:
    """The gradients of a step: the sum over its `parts`. None: there are none, or the step has taken them."""

    gradients: Params | None = None
    parts: list[Accumulation] = field(default_factory=list)

    def add(self, part: Accumulation) -> None:
        """Adds a further part, whose gradients are taken from it, and added up in place. If that fails, nothing has
        changed."""
        gradients, part.gradients = part.gradients, None
        if self.gradients is not None:
            summed = tree_map(mx.add, self.gradients, gradients)
            del gradients  # MLX adds in place if nothing else refers to them
            mx.eval(summed)
            gradients = summed
        self.gradients = gradients
        self.parts.append(part)

    def clip(self, most: float) -> float:
        """Scales the gradients down if their norm is above `most`. Returns what it was."""
        clipped, norm = clip_grad_norm(self.gradients, most)
        self.gradients = clipped
        return cast(float, norm.item())

    def take(self) -> Params:
        """The gradients. If the caller passes them on, nothing else refers to them, so MLX may write into them."""
        gradients, self.gradients = self.gradients, None
        return cast(Params, gradients)


def metrics(parts: Sequence[Accumulation]) -> dict[str, float]:
    """Means over all trained tokens, and the sums `loss`, `tokens` and `device_seconds`. The KL from the base model is
    an estimate if it is not part of the loss. `kl_mismatched` is kto's z0."""
    figures = means([sums for part in parts for sums in part.sums])
    if measured := [(part.base_kl, part.trained_tokens) for part in parts if part.base_kl is not None]:
        figures["kl"] = sum(kl * tokens for kl, tokens in measured) / sum(tokens for _, tokens in measured)
    if estimates := [part.kl_estimate for part in parts if part.loss.kind is LossKind.KTO]:
        figures["kl_mismatched"] = sum(estimates) / len(estimates)
    return {
        **figures,
        "loss": sum(cast(float, loss.item()) for part in parts for loss in part.losses),
        "tokens": float(sum(part.trained_tokens for part in parts)),
        "device_seconds": sum(part.device_seconds for part in parts),
    }
