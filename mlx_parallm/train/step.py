"""Step: one optimizer step of one policy, from the gradients that it has accumulated.

gradients ─▶ clip, AdamW, check ─▶ (KL of the step ─▶ moved back, if it is too long) ─▶ outcome

The policy does not change until the step is finished. So one that fails, is skipped or is abandoned needs no undoing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.config import OptimizerConfig
from mlx_parallm.train.accumulation import Accumulated, Accumulation
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import UpdateOutcome
from mlx_parallm.train.policy import Policy, PolicyState

_log = logging.getLogger(__name__)

NO_GRADIENT = "no_gradient"
"""Why a step was skipped that had nothing to learn from. The other reasons are faults."""

_MEASUREMENTS = 8
"""Most measurements of one step. What is still too long then is judged by the limits of divergence."""

_MARGIN, _LEAST_SHARE = 0.9, 0.1
"""A step is moved back to a little less than the target, and at most to a tenth at a time: far from the policy, the KL
says little about how the KL falls as the step shrinks."""


class Step:
    """Makes one optimizer step.

    Attributes:
        needs: accumulations without which the step is not made.
        measured: accumulations over a sample of which its KL is measured; empty: it is not, nor is it moved back. In an
            update of several steps, the last one measures that of the update.
        after: the state of the policy after the step. None: it was not made yet, or was skipped.
        skipped: why it was skipped, or "".
        kl: estimated KL of the policy before from the one after, in nats per token; None: it was not measured.
        device_seconds: the time of the units that worked on it.
        future: completed by the trainer, with the outcome or StepFailedError.

    Args:
        scale: multiplies the gradients before they are clipped, and the change of the policy. Below 1 if only a part of
            the samples has a signal: the others count with a gradient of zero.
        metrics: further metrics of the samples, for the outcome.
        origin: the state from which the step is measured, and towards which it is moved back; None: that of the policy
            before the step.
        needs_gradient: skip the step if all gradients are zero. What AdamW remembers of earlier ones would still move
            the policy.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig,
        scale: float = 1.0,
        metrics: Mapping[str, float] | None = None,
        needs: Sequence[Accumulation] = (),
        measured: Sequence[Accumulation] = (),
        origin: Callable[[], PolicyState | None] = lambda: None,
        needs_gradient: bool = False,
    ) -> None:
        self.policy = policy
        self.needs = needs
        self.measured = measured
        self.after: PolicyState | None = None
        self.skipped = ""
        self.kl: float | None = None
        self.device_seconds = 0.0
        self.future: Future[UpdateOutcome] = Future()
        self._optimizer = optimizer
        self._scale = scale
        self._metrics = metrics or {}
        self._origin = origin
        self._needs_gradient = needs_gradient
        self._share = 1.0  # of the way that the step would have gone
        self._moves = 0
        self._grad_norm = 0.0
        self._began = time.monotonic()

    def run(self, accumulated: Accumulated) -> None:
        """Computes `after` from the gradients, which it takes and clips. If anything is not finite, sets `skipped`
        instead."""
        self._grad_norm = cast(float, norm(accumulated.gradients).item())
        if not math.isfinite(accumulated.loss):
            self.skipped = "loss_not_finite"
        elif not math.isfinite(self._grad_norm):
            self.skipped = "gradient_not_finite"
        elif self._needs_gradient and self._grad_norm == 0:
            self.skipped = NO_GRADIENT
        else:
            after = self.policy.stepped(self._taken(accumulated), self._optimizer, self._scale)
            if _all_finite(after.params):
                self.after = after
            else:
                self.skipped = "weights_not_finite"
        accumulated.gradients = {}
        if self.skipped:
            _log.warning("an update was skipped: %s", self.skipped)

    def move_back(self) -> bool:
        """Moves the step back if the KL that was measured is above the target. Returns whether it did.

        The KL grows with the square of the way for small steps, so one more measurement is usually enough. All of this
        depends on the samples and the policy alone, so a replayed update is the same to the bit.
        """
        limit = self._optimizer.max_kl_step
        if limit is None or self.kl is None or self.after is None or self._moves == _MEASUREMENTS - 1:
            return False
        if self.kl <= limit:  # false for NaN, which is too far
            return False
        share = _MARGIN * math.sqrt(limit / self.kl) if math.isfinite(self.kl) else _LEAST_SHARE
        share = max(share, _LEAST_SHARE)
        self.after = self.policy.moved_back(self.after, self._origin() or self.policy.state, share)
        self._share *= share
        self._moves += 1
        return True

    def _taken(self, accumulated: Accumulated) -> Params:
        """Takes the gradients, multiplied by `scale`, and scaled down if their norm is still too large. Nothing else
        refers to them then, so MLX may write into their arrays."""
        gradients, accumulated.gradients = accumulated.gradients, {}
        scale = self._scale
        if scale * self._grad_norm > self._optimizer.max_grad_norm:
            scale = self._optimizer.max_grad_norm / self._grad_norm
        if scale == 1.0:
            return gradients
        return cast(Params, tree_map(lambda leaf: leaf * scale, gradients))

    def outcome(self, accumulated: Accumulated) -> UpdateOutcome:
        """The outcome of a finished step."""
        after = self.after or self.policy.state
        metrics = {**self._metrics, **accumulated.metrics(), "grad_norm": self._grad_norm}
        if self.kl is not None:
            metrics["kl_step"] = self.kl
        if self.after is not None:
            metrics["learning_rate"] = self.after.learning_rate
        metrics["step_scale"] = self._scale * self._share
        metrics["seconds"] = time.monotonic() - self._began
        metrics["device_seconds"] += self.device_seconds
        return UpdateOutcome(after.step, self.skipped, metrics)


def norm(gradients: Params) -> mx.array:
    return mx.sqrt(sum((leaf.square().sum() for _, leaf in tree_flatten(gradients)), mx.array(0.0)))


def _all_finite(params: Params) -> bool:
    return bool(mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(params)])).item())
