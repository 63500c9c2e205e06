"""Update: one optimizer step of one policy, collected from micro-steps.

sample batches ─▶ gradients, losses, statistics ─▶ clip, AdamW, check ─▶ (KL of the step) ─▶ outcome

The policy is left alone until `apply`, the last thing that happens. So an update that fails, is skipped or is abandoned
needs no undoing.
"""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.errors import StepFailedError
from mlx_parallm.rl.events import UpdateOutcome
from mlx_parallm.rl.learn.forwards import MicroStepResult
from mlx_parallm.rl.learn.model import Params
from mlx_parallm.rl.learn.packing import SampleBatch, split_samples
from mlx_parallm.rl.learn.policy import Policy, PolicyState
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.losses import LossStats, UpdateTotals, means

_log = logging.getLogger(__name__)

_KL_SAMPLING = 4
"""One in this many sample batches is compared with the base model."""


class Update:
    """Splits its samples into batches, adds up their gradients, and makes the optimizer step.

    The split depends on this update alone, whatever other updates share its micro-steps.

    Attributes:
        pending: sample batches that no micro-step has taken yet. `all_batches`: all of them.
        logprobs: of each batch's completion tokens under the policy before the step, fp32 [N].
        after: the policy after the optimizer step; None before the step, and if it was skipped.
        skipped: why the step was skipped, or "".
        finished: nothing is left to do but to `apply` it.
        device_seconds: its share of the time of the units that worked on it.
        future: completed by the trainer, with the outcome or StepFailedError.
    """

    def __init__(self, policy: Policy, batch: UpdateBatch) -> None:
        self.policy = policy
        self.totals = UpdateTotals.of(batch.samples)
        self.pending: deque[SampleBatch] = deque()
        self.all_batches: tuple[SampleBatch, ...] = ()
        self.logprobs: dict[SampleBatch, mx.array] = {}
        self.after: PolicyState | None = None
        self.skipped = ""
        self.started = self.finished = False
        self.device_seconds = 0.0
        self.future: Future[UpdateOutcome] = Future()
        self._batch = batch
        self._began = time.monotonic()
        self._gradients: Params | None = None
        self._losses: list[mx.array] = []
        self._stats: list[LossStats] = []
        self._grad_norm = 0.0
        self._step_kl: float | None = None
        self._base_kls: list[float] = []

    # -- micro-steps -----------------------------------------------------------------------------

    def start(self, max_tokens: int) -> None:
        """Splits the samples into batches of at most `max_tokens`."""
        self.all_batches = tuple(split_samples(self._batch.samples, max_tokens))
        self.pending.extend(self.all_batches)
        self.started = True

    def take(self, max_tokens: float) -> SampleBatch | None:
        """The next pending batch of at most `max_tokens`."""
        for at, batch in enumerate(self.pending):
            if batch.size <= max_tokens:
                del self.pending[at]
                return batch
        return None

    def add(self, batch: SampleBatch, result: MicroStepResult) -> None:
        """Adds up the gradients of a batch, lazily. MLX adds in place if the caller keeps no reference to them."""
        add_up = partial(tree_map, mx.add)
        self._gradients = result.gradients if self._gradients is None else add_up(self._gradients, result.gradients)
        self._losses.append(result.loss)
        self._stats.append(result.stats)
        self.logprobs[batch] = result.logprobs

    def gradients(self, paths: Sequence[str]) -> list[mx.array]:
        """The sums so far for the linears at these paths; they may be lazy."""
        assert self._gradients is not None
        return [leaf for path in paths for leaf in self._gradients.get(path, {}).values()]

    # -- the optimizer step ----------------------------------------------------------------------

    def step(self, max_grad_norm: float) -> None:
        """Computes `after` from the clipped gradients. If anything is not finite, sets `skipped` instead."""
        assert self._gradients is not None
        self._grad_norm = _norm(self._gradients)
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
        """The gradients of the whole batch that was asked for, in which samples without a signal have none."""
        gradients, self._gradients = self._gradients, None
        scale = self._batch.step_scale
        norm = scale * self._grad_norm
        if norm > max_grad_norm:
            scale *= max_grad_norm / norm
        if scale == 1.0:
            return cast(Params, gradients)
        return cast(Params, tree_map(lambda leaf: leaf * scale, gradients))

    def apply(self) -> None:
        """Moves the policy to `after`."""
        if self.after is not None:
            self.policy.restore(self.after)

    # -- KL divergences --------------------------------------------------------------------------

    def add_step_kl(self, kl: mx.array) -> None:
        """Adds the KL of one batch between the policy before and after the step, summed over its tokens."""
        self._step_kl = (self._step_kl or 0.0) + _number(kl)

    def add_base_kl(self, kl: mx.array) -> None:
        """Adds the mean KL of one sampled batch between the policy before the step and the base model."""
        self._base_kls.append(_number(kl))

    def sampled_batches(self) -> list[SampleBatch]:
        """A quarter of the batches, at least one, drawn so that the mean of their means is an unbiased estimate of the
        mean over all tokens.

        Systematic sampling with probability proportional to size (Madow 1949): evenly spaced tokens are picked from a
        random first one, and each brings its batch, which may come twice. The number of the policy's step is the seed,
        so that a replayed update picks the same batches.
        """
        ends = list(accumulate(batch.trained_tokens for batch in self.all_batches))
        picks = math.ceil(len(ends) / _KL_SAMPLING)
        start = random.Random(self.policy.state.step).random()
        return [self.all_batches[bisect(ends, (start + at) / picks * ends[-1])] for at in range(picks)]

    # -- the end ---------------------------------------------------------------------------------

    @property
    def _loss(self) -> float:
        return sum(_number(loss) for loss in self._losses)

    def outcome(self) -> UpdateOutcome:
        """The outcome of a finished update."""
        after = self.after or self.policy.state
        metrics = {**self._batch.metrics, **means(self._stats), "loss": self._loss, "grad_norm": self._grad_norm}
        if self._step_kl is not None:
            metrics["kl_step"] = self._step_kl / self.totals.tokens
        if self._base_kls:
            metrics["kl"] = sum(self._base_kls) / len(self._base_kls)
        metrics["learning_rate"] = after.learning_rate
        metrics["step_scale"] = self._batch.step_scale
        metrics["tokens"] = float(self.totals.tokens)
        metrics["seconds"] = time.monotonic() - self._began
        metrics["device_seconds"] = self.device_seconds
        return UpdateOutcome(after.step, self.skipped, metrics)

    def fail(self) -> None:
        """Completes the future of an update that failed or was abandoned. The policy is as before."""
        self.future.set_exception(StepFailedError("the update failed on the device; the policy is as before"))


def _norm(gradients: Params) -> float:
    leaves = [leaf for _, leaf in tree_flatten(gradients)]
    return _number(mx.sqrt(sum((leaf.square().sum() for leaf in leaves), mx.array(0.0))))


def _all_finite(params: Params) -> bool:
    return bool(mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(params)])).item())


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
