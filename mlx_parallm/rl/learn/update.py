"""Update: one optimizer step of one policy, collected from micro-steps.

sample batches ─▶ gradients, losses, statistics ─▶ clip, AdamW, check ─▶ (KL of the step) ─▶ outcome

The policy does not change until the update is finished. So an update that fails, is skipped or is abandoned needs no
undoing.
"""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect
from concurrent.futures import Future
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.rl.events import UpdateOutcome
from mlx_parallm.rl.learn.forwards import MicroStepResult
from mlx_parallm.rl.learn.model import Params
from mlx_parallm.rl.learn.packing import SampleBatch, split_samples
from mlx_parallm.rl.learn.policy import Policy, PolicyState
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.losses import LossStats, means
from mlx_parallm.rl.objectives.reductions import UpdateTotals

_log = logging.getLogger(__name__)

_KL_SAMPLING = 4
"""One in this many sample batches is compared with the base model."""


class Update:
    """Splits its samples into batches, adds up their gradients, and makes the optimizer step.

    The split depends on this update alone, whatever other updates share its micro-steps.

    Attributes:
        batches: all sample batches. `pending`: those that no micro-step has taken yet.
        gradients: their sum so far; None before the first micro-step and after the optimizer step.
        logprobs: of each batch's trained tokens under the policy before the step, fp32 [N].
        after: the state of the policy after the optimizer step. None: the step was not made yet, or was skipped.
        skipped: why the step was skipped, or "".
        base_kls: mean KL of each sampled batch between the policy before the step and the base model.
        step_kls: KL of each batch between the policy before and after the step, summed over its tokens.
        device_seconds: its share of the time of the units that worked on it.
        future: completed by the trainer, with the outcome or StepFailedError.

    Args:
        max_tokens: most tokens of a batch. A single sample may have more.
    """

    def __init__(self, policy: Policy, batch: UpdateBatch, max_tokens: int) -> None:
        self.policy = policy
        self.totals = UpdateTotals.of(batch.samples)
        self.batches = tuple(split_samples(batch.samples, max_tokens))
        self.pending = list(self.batches)
        self.gradients: Params | None = None
        self.logprobs: dict[SampleBatch, mx.array] = {}
        self.after: PolicyState | None = None
        self.skipped = ""
        self.base_kls: list[float] = []
        self.step_kls: list[float] = []
        self.device_seconds = 0.0
        self.future: Future[UpdateOutcome] = Future()
        self._batch = batch
        self._began = time.monotonic()
        self._losses: list[mx.array] = []
        self._stats: list[LossStats] = []
        self._loss = self._grad_norm = 0.0

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
        self._losses.append(result.loss)
        self._stats.append(result.stats)

    def sampled_batches(self) -> list[SampleBatch]:
        """A quarter of the batches, at least one, drawn so that the mean of their means is an unbiased estimate of the
        mean over all tokens.

        Systematic sampling with probability proportional to size (Madow 1949): from a random first token on, evenly
        spaced tokens are picked. The batch of each picked token is taken, so a batch may come twice. The number of the
        policy's step is the seed, so that a replayed update picks the same batches.
        """
        ends = list(accumulate(batch.trained_tokens for batch in self.batches))
        picks = math.ceil(len(ends) / _KL_SAMPLING)
        start = random.Random(self.policy.state.step).random()
        return [self.batches[bisect(ends, (start + at) / picks * ends[-1])] for at in range(picks)]

    def step(self, max_grad_norm: float) -> None:
        """Computes `after` from the clipped gradients. If anything is not finite, sets `skipped` instead."""
        assert self.gradients is not None
        self._loss = sum(map(_number, self._losses))
        self._grad_norm = _number(_norm(self.gradients))
        if not math.isfinite(self._loss):
            self.skipped = "loss_not_finite"
        elif not math.isfinite(self._grad_norm):
            self.skipped = "gradient_not_finite"
        else:
            after = self.policy.stepped(self._clipped(max_grad_norm), self._batch.step_scale)
            if _all_finite(after.params):
                self.after = after
            else:
                self.skipped = "weights_not_finite"
        if self.skipped:
            _log.warning("an update was skipped: %s", self.skipped)

    def _clipped(self, max_grad_norm: float) -> Params:
        """The gradients, multiplied by `step_scale`, and scaled down if their norm is still too large. Because of
        `step_scale`, samples that were dropped for having no signal count with a gradient of zero."""
        gradients, self.gradients = self.gradients, None
        scale = self._batch.step_scale
        norm = scale * self._grad_norm
        if norm > max_grad_norm:
            scale *= max_grad_norm / norm
        if scale == 1.0:
            return cast(Params, gradients)
        return cast(Params, tree_map(lambda leaf: leaf * scale, gradients))

    def outcome(self) -> UpdateOutcome:
        """The outcome of a finished update."""
        after = self.after or self.policy.state
        metrics = {**self._batch.metrics, **means(self._stats), "loss": self._loss, "grad_norm": self._grad_norm}
        if self.step_kls:
            metrics["kl_step"] = sum(self.step_kls) / self.totals.tokens
        if self.base_kls:
            metrics["kl"] = sum(self.base_kls) / len(self.base_kls)
        metrics["learning_rate"] = after.learning_rate
        metrics["step_scale"] = self._batch.step_scale
        metrics["tokens"] = float(self.totals.tokens)
        metrics["seconds"] = time.monotonic() - self._began
        metrics["device_seconds"] = self.device_seconds
        return UpdateOutcome(after.step, self.skipped, metrics)


def _norm(gradients: Params) -> mx.array:
    return mx.sqrt(sum((leaf.square().sum() for _, leaf in tree_flatten(gradients)), mx.array(0.0)))


def _all_finite(params: Params) -> bool:
    return bool(mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(params)])).item())


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
