"""GRPOTrainer: updates of policies on the served base weights, as units of device work.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ done(outcome)
                             forward, backward, gradients added up

The base's weights appear in the graph as constants: only the factors of the policy's linears have gradients.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.errors import StepFailedError
from mlx_parallm.rl.losses import Stats, TokenBatch, loss, means
from mlx_parallm.rl.packing import MicroBatch, micro_batches, pack
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.reductions import UpdateTotals
from mlx_parallm.rl.samples import Sample, UpdateBatch, UpdateOutcome
from mlx_parallm.rl.scores import token_scores
from mlx_parallm.rl.settings import OldLogprobs, TrainerSettings
from mlx_parallm.rl.trainable import Params, TrainableModel

_log = logging.getLogger(__name__)

Done = Callable[[UpdateOutcome | Exception], None]


@dataclass(eq=False, slots=True)
class _Update:
    """One update on its way: what its micro-steps have added up so far. `moved`: sum of k3 over its tokens."""

    policy: Policy
    batch: UpdateBatch
    done: Done
    began: float = field(default_factory=time.monotonic)
    device_seconds: float = 0.0
    gradients: Params | None = None
    loss: float = 0.0
    stats: list[Stats] = field(default_factory=list)
    grad_norm: float = 0.0
    moved: float = 0.0


class GRPOTrainer:
    """Implements `core.DeviceWork`. Device thread only. Holds nothing on the device between updates."""

    def __init__(self, model: TrainableModel, settings: TrainerSettings) -> None:
        self.model = model
        self.settings = settings
        self._queue: deque[_Update] = deque()
        self._update: _Update | None = None
        self._job: Iterator[None] | None = None

    def begin(self, policy: Policy, batch: UpdateBatch, done: Done) -> None:
        """Queues one update; `done` is told what came of it, on the device thread."""
        self._queue.append(_Update(policy, batch, done))

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return self._update is not None or bool(self._queue)

    def advance(self) -> None:
        """One micro-step, or the optimizer's step at the end."""
        if self._update is None:
            self._update = self._queue.popleft()
            self._job = self._run(self._update)
        assert self._job is not None
        started = time.monotonic()
        finished = next(self._job, self) is self
        self._update.device_seconds += time.monotonic() - started
        if finished:
            self._update = self._job = None

    def reset(self) -> None:
        """Gives up the update that failed; its policy is as before."""
        update, self._update, self._job = self._update, None, None
        if update is not None:
            update.done(StepFailedError("the update failed on the device; the policy is as before"))

    # -- an update -------------------------------------------------------------------------------

    def _run(self, update: _Update) -> Iterator[None]:
        parts = list(micro_batches(update.batch.samples, self.settings.micro_batch_tokens))
        totals = UpdateTotals.of(update.batch.samples)
        for samples in parts:
            self._micro_step(update, samples, totals)
            yield
        undo = update.policy.keep()
        skipped = self._apply(update)
        if not skipped and self.settings.measure_step_kl:
            for samples in parts:
                yield
                self._measure_step(update, samples)
        if skipped:
            undo()
        update.done(self._outcome(update, totals, skipped))

    def _micro_step(self, update: _Update, samples: tuple[Sample, ...], totals: UpdateTotals) -> None:
        batch = pack(samples)
        denominators = totals.for_rows(samples)
        reference = self._reference(batch) if self.settings.loss.kl_coef or self.settings.measure_kl else None

        def objective(params: Params) -> tuple[mx.array, Stats]:
            logp, entropy = self._scores(batch, params, update.policy.scale)
            tokens = self._token_batch(batch, batch.padded(logp), batch.padded(entropy), reference)
            return loss(tokens, denominators, self.settings.loss)

        (value, stats), gradients = mx.value_and_grad(objective)(update.policy.params)
        total = gradients if update.gradients is None else tree_map(mx.add, update.gradients, gradients)
        mx.eval(total, value, stats.arrays())
        update.gradients = total
        update.loss += _number(value)
        update.stats.append(stats)

    def _scores(self, batch: MicroBatch, params: Params, scale: float) -> tuple[mx.array, mx.array]:
        """Logprobs and entropies of the completion tokens, fp32 [N]."""
        return self._at_targets(batch, self.model.hidden(batch.tokens, batch.lies, params, scale))

    def _reference(self, batch: MicroBatch) -> mx.array:
        """Logprobs under the base, [B, C]: slot 0 is the same model without factors."""
        logp, _ = self._at_targets(batch, self.model.hidden(batch.tokens, batch.lies, None, 0.0))
        return mx.stop_gradient(batch.padded(logp))

    def _at_targets(self, batch: MicroBatch, hidden: mx.array) -> tuple[mx.array, mx.array]:
        trained = hidden[batch.positions]
        entropy_gradient = self.settings.loss.entropy_coef != 0.0
        return token_scores(self.model.logits, trained, batch.targets, batch.temperatures, entropy_gradient)

    def _token_batch(
        self, batch: MicroBatch, logp: mx.array, entropy: mx.array, reference: mx.array | None
    ) -> TokenBatch:
        """π_old and μ by the rule of `LossSettings.old_logprobs`; a row without μ has the trainer's own for both."""
        now = mx.stop_gradient(logp)
        sampler = mx.where(batch.known, batch.sampling_logprobs, now)
        trainers = self.settings.loss.old_logprobs is OldLogprobs.TRAINER
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

    # -- the optimizer's step --------------------------------------------------------------------

    def _apply(self, update: _Update) -> str:
        """Clips and applies the gradients. Why nothing is to be kept of it, or ""."""
        assert update.gradients is not None
        gradients, update.gradients = update.gradients, None
        leaves = [leaf for _, leaf in tree_flatten(gradients)]
        norm = _number(mx.sqrt(sum((leaf.square().sum() for leaf in leaves), mx.array(0.0))))
        update.grad_norm = norm
        if not math.isfinite(update.loss):
            return "loss_not_finite"
        if not math.isfinite(norm):
            return "gradient_not_finite"
        most = self.settings.optimizer.max_grad_norm
        if norm > most:
            gradients = tree_map(lambda leaf: leaf * (most / norm), gradients)
        update.policy.apply(gradients)
        finite = mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(update.policy.params)]))
        return "" if finite.item() else "weights_not_finite"

    def _measure_step(self, update: _Update, samples: tuple[Sample, ...]) -> None:
        """Adds up k3 of the policy before the step against the one after it, over the batch's tokens.

        Logprobs before the step are the sampler's: of the tokens' own distribution.
        """
        batch = pack(samples)
        logp, _ = self._scores(batch, update.policy.params, update.policy.scale)
        change = mx.where(batch.known, batch.padded(logp) - batch.sampling_logprobs, 0.0) * batch.mask
        total = (mx.expm1(change) - change).sum()
        update.moved += _number(total)

    def _outcome(self, update: _Update, totals: UpdateTotals, skipped: str) -> UpdateOutcome:
        metrics = {**update.batch.metrics, **means(update.stats), "loss": update.loss, "grad_norm": update.grad_norm}
        if self.settings.measure_step_kl and not skipped:
            metrics["kl_step"] = update.moved / totals.tokens
        metrics["learning_rate"] = update.policy.learning_rate
        metrics["tokens"] = float(totals.tokens)
        metrics["seconds"] = time.monotonic() - update.began
        metrics["device_seconds"] = update.device_seconds
        if skipped:
            _log.warning("an update was skipped: %s", skipped)
        return UpdateOutcome(update.policy.step, skipped, metrics)


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
