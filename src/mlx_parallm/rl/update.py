"""One update on its way: what is left of its samples, and what its micro-steps have added up so far.

portions ─▶ gradients, losses, statistics ─▶ clip, AdamW, check ─▶ (how far it moved) ─▶ outcome
"""

from __future__ import annotations

import logging
import math
import random
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.errors import StepFailedError
from mlx_parallm.rl.forwards import SharePart
from mlx_parallm.rl.kept import KeptPolicy
from mlx_parallm.rl.losses import Stats, means
from mlx_parallm.rl.packing import Portion, portions
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.reductions import UpdateTotals
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.trainable import Params

_log = logging.getLogger(__name__)

_SAMPLED = 4
"""One in so many portions is compared with the base."""

Done = Callable[[UpdateOutcome | Exception], None]


class Update:
    """Hands out its portions, takes in their gradients, makes the optimizer's step, and tells `done` what came of it.

    How it is split is its own affair, whatever else trains beside it, and fixed when it starts.

    Attributes:
        portions: those not yet handed out. `all_portions`: those it had when it started.
        logprobs: of each portion's tokens under the policy before the step, fp32 [N], of its own micro-step.
        stepped: the optimizer's step was made, or given up. `finished`: whoever conducts it has nothing left to do.
        device_seconds: its share of the units that worked for it.
    """

    def __init__(self, policy: Policy, batch: UpdateBatch, done: Done) -> None:
        self.policy = policy
        self.totals = UpdateTotals.of(batch.samples)
        self.portions: deque[Portion] = deque()
        self.all_portions: tuple[Portion, ...] = ()
        self.logprobs: dict[Portion, mx.array] = {}
        self.device_seconds = 0.0
        self.started = self.stepped = self.finished = False
        self.skipped = ""
        self.done = done
        self._batch = batch
        self._began = time.monotonic()
        self._gradients: Params | None = None
        self._losses: list[mx.array] = []
        self._stats: list[Stats] = []
        self._grad_norm = 0.0
        self._moved: float | None = None
        self._kl: list[float] = []
        self._before: KeptPolicy | None = None

    # -- micro-steps -----------------------------------------------------------------------------

    def start(self, most: int) -> None:
        """Splits its samples into portions of at most this size."""
        self.all_portions = tuple(portions(self._batch.samples, most))
        self.portions.extend(self.all_portions)
        self.started = True

    def take(self, room: float) -> Portion | None:
        """The next portion that is no larger than `room`."""
        for at, portion in enumerate(self.portions):
            if portion.size <= room:
                del self.portions[at]
                return portion
        return None

    def include(self, portion: Portion, part: SharePart) -> None:
        """Adds up what a portion gave; lazy. Where the caller keeps no gradients they are added in place."""
        add_up = partial(tree_map, mx.add)
        self._gradients = part.gradients if self._gradients is None else add_up(self._gradients, part.gradients)
        self._losses.append(part.loss)
        self._stats.append(part.stats)
        self.logprobs[portion] = part.logprobs

    def gradients(self, paths: Sequence[str]) -> list[mx.array]:
        """What has been added up for the linears of these paths; it may be lazy."""
        assert self._gradients is not None
        return [leaf for path in paths for leaf in self._gradients.get(path, {}).values()]

    # -- the optimizer's step --------------------------------------------------------------------

    def step(self, max_grad_norm: float) -> None:
        """Applies the gradients, clipped. A step that cannot be kept is taken back, and `skipped` says why."""
        self._before = self.policy.keep()
        self.skipped = self._apply(max_grad_norm)
        self.stepped = True
        if self.skipped:
            _log.warning("an update was skipped: %s", self.skipped)
            self._go_back()

    def _go_back(self) -> None:
        """The policy as before the step, where one was made."""
        if self._before is not None:
            self.policy.restore(self._before)

    def _apply(self, most: float) -> str:
        assert self._gradients is not None
        self._grad_norm = _norm(self._gradients)
        if not math.isfinite(self._loss):
            return "loss_not_finite"
        if not math.isfinite(self._grad_norm):
            return "gradient_not_finite"
        self.policy.apply(self._clipped(most), self._batch.step_scale)
        finite = mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(self.policy.params)]))
        return "" if finite.item() else "weights_not_finite"

    def _clipped(self, most: float) -> Params:
        """Those of the whole batch that was asked for, in which samples without a signal have none."""
        gradients, self._gradients = self._gradients, None
        scale = self._batch.step_scale
        norm = scale * self._grad_norm
        if norm > most:
            scale *= most / norm
        if scale == 1.0:
            return cast(Params, gradients)
        return cast(Params, tree_map(lambda leaf: leaf * scale, gradients))

    def moved(self, change: mx.array) -> None:
        """Adds to how far the step moved the policy, summed over tokens."""
        self._moved = (self._moved or 0.0) + _number(change)

    def sampled_portions(self) -> list[Portion]:
        """A quarter of the portions, one at least, drawn so that the mean of their means is an unbiased estimate of the
        mean over all tokens.

        Systematic sampling with probability proportional to size (Madow 1949): evenly spaced tokens are picked from a
        random first one, and each brings its portion, which may come twice. The number of the policy's step is the
        seed, so a replayed update picks the same ones.
        """
        ends = list(accumulate(portion.trained_tokens for portion in self.all_portions))
        picks = math.ceil(len(ends) / _SAMPLED)
        start = random.Random(self.policy.step).random()
        return [self.all_portions[bisect(ends, (start + at) / picks * ends[-1])] for at in range(picks)]

    def apart(self, kl: mx.array) -> None:
        """Takes in the mean KL to the base of one sampled portion."""
        self._kl.append(_number(kl))

    # -- its end ---------------------------------------------------------------------------------

    @property
    def _loss(self) -> float:
        return sum(_number(loss) for loss in self._losses)

    def settle(self) -> None:
        """The step is not taken back any more."""
        self._before = None

    def outcome(self) -> UpdateOutcome:
        """Of an update that is finished: made, or skipped."""
        metrics = {**self._batch.metrics, **means(self._stats), "loss": self._loss, "grad_norm": self._grad_norm}
        if self._moved is not None:
            metrics["kl_step"] = self._moved / self.totals.tokens
        if self._kl:
            metrics["kl"] = sum(self._kl) / len(self._kl)
        metrics["learning_rate"] = self.policy.learning_rate
        metrics["step_scale"] = self._batch.step_scale
        metrics["tokens"] = float(self.totals.tokens)
        metrics["seconds"] = time.monotonic() - self._began
        metrics["device_seconds"] = self.device_seconds
        return UpdateOutcome(self.policy.step, self.skipped, metrics)

    def fail(self) -> None:
        """Tells that the device gave it up. The policy is as before."""
        try:
            self._go_back()
        finally:  # whoever waits for it is told, whatever else fails
            self.done(StepFailedError("the update failed on the device; the policy is as before"))


def _norm(gradients: Params) -> float:
    leaves = [leaf for _, leaf in tree_flatten(gradients)]
    return _number(mx.sqrt(sum((leaf.square().sum() for leaf in leaves), mx.array(0.0))))


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
