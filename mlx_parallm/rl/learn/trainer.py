"""GRPOTrainer: updates of policies on the served base weights, as units of device work.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ outcome
                            forward, backward, gradients added up

The trainer works on one job after another: a micro-step, or the end of an update. A job is a generator that yields
when the rest of it needs a new unit (see `pacing`). Updates of one policy follow each other. Updates of different
policies share micro-steps: each micro-step takes a batch of samples of the oldest update, and one of every other update
whose batch still fits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_parallm.config import ModelConfig, ResolvedTraining
from mlx_parallm.errors import StepFailedError
from mlx_parallm.rl.events import UpdateOutcome
from mlx_parallm.rl.learn.forwards import MicroStepInput, TrainingForwards
from mlx_parallm.rl.learn.model import Span, TrainableModel
from mlx_parallm.rl.learn.pacing import Pacer, Stage
from mlx_parallm.rl.learn.packing import SampleBatch, pack
from mlx_parallm.rl.learn.policy import Policy, PolicySnapshot, PolicyState
from mlx_parallm.rl.learn.update import Update
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.losses import k3

_MEASURED_JOBS = 16
"""Jobs whose memory is remembered."""


class GRPOTrainer:
    """Implements `core.TrainingWork`. Device thread only, except `peak_bytes`.

    Args:
        lora: rank, alpha and target modules of new adapters.
        measure_kl: report the KL divergence from the base model even if it has no weight in the loss, for one more
            forward pass over a random quarter of the micro-batches.
    """

    def __init__(
        self, model: TrainableModel, config: ResolvedTraining, lora: ModelConfig, measure_kl: bool = True
    ) -> None:
        self.model = model
        self.config = config
        self.lora = lora
        self._measure_kl = measure_kl
        self._forwards = TrainingForwards(model, config.loss)
        self._pacer = Pacer()
        self._policies: dict[str, Policy] = {}
        self._queue: list[Update] = []
        self._job: _Job | None = None
        self._job_bytes = deque([0], maxlen=_MEASURED_JOBS)
        self._peak_bytes = 0

    # -- policies --------------------------------------------------------------------------------

    def open(self, name: str, start: PolicySnapshot | None = None) -> Policy:
        """Makes the policy of a name, in place of an earlier one. Raises what `Policy` raises."""
        policy = Policy(self.model.layout, self.lora, self.config.optimizer, self.config.seed, start)
        self._policies[name] = policy
        return policy

    def begin(self, policy: Policy, batch: UpdateBatch) -> Future[UpdateOutcome]:
        """Queues one update. Its future is completed on the device thread.

        The future raises StepFailedError if the update failed or was abandoned; the policy is as before then.
        """
        update = Update(policy, batch, self.config.micro_batch_tokens)
        self._queue.append(update)
        return update.future

    def abandon(self, policy: Policy) -> None:
        """Fails the updates of this policy, and those that share the current micro-step with one of them."""
        if self._job is not None and any(update.policy is policy for update in self._job.tokens):
            self.reset()
        self._fail([update for update in self._queue if update.policy is policy])

    @property
    def bytes_held(self) -> int:
        """Bytes of all states of policies that something holds, and while updates wait, of gradients and of the arrays
        that a micro-step needs beside them, as far as that was measured."""
        held = sum(policy.nbytes * len(policy.states) for policy in self._policies.values())
        if self._queue:
            held += 4 * sum(policy.parameters for policy in {update.policy for update in self._queue})
            held += max(*self._job_bytes, self._job.most_bytes if self._job else 0)
        return held

    @property
    def peak_bytes(self) -> int:
        """The most that MLX has held since the process started. Running a job resets MLX's own counter."""
        return max(self._peak_bytes, mx.get_peak_memory())

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self._pacer.budget = seconds

    def advance(self) -> None:
        """Runs one unit: a part of a job, or several short jobs. It ends when an update is finished, because its
        outcome is waited for."""
        self._pacer.begin()
        more = True
        while more:
            self._peak_bytes = self.peak_bytes
            job = self._job = self._job or self._next_job()
            done = job.run()
            if done and job.finishes is not None:
                self._complete(job.finishes)
            elif done:
                self._forget_job()
            more = done and job.finishes is None and self._pacer.has_room

    def _complete(self, update: Update) -> None:
        """Moves the policy to the state after the step, and completes the future. Nothing may fail once the update has
        left the queue."""
        outcome = update.outcome()
        self._forget_job()
        self._queue.remove(update)
        if update.after is not None:
            update.policy.restore(update.after)
        update.future.set_result(outcome)

    def reset(self) -> None:
        """Fails the updates of the job that failed. Their policies are as before."""
        failed = list(self._job.tokens) if self._job else self._queue[:1]
        self._forget_job()
        self._fail(failed)

    def _forget_job(self) -> None:
        if self._job is not None:
            self._job_bytes.append(self._job.most_bytes - max(self._job.kept_bytes, 0))
        self._job = None

    def _fail(self, updates: Sequence[Update]) -> None:
        self._queue = [update for update in self._queue if update not in updates]
        for update in updates:
            update.future.set_exception(StepFailedError("the update failed on the device; the policy is as before"))

    # -- jobs ------------------------------------------------------------------------------------

    def _next_job(self) -> _Job:
        """The end of an update whose micro-steps are all done, or else a micro-step with a batch of samples of the
        oldest update, and one of the oldest update of every other policy as long as they fit."""
        oldest: dict[Policy, Update] = {}
        for update in self._queue:
            oldest.setdefault(update.policy, update)
        for update in oldest.values():
            if not update.pending:
                return _Job({update: 1}, self._conclude(update), finishes=update)
        room: float = self.config.micro_batch_tokens
        batches: dict[Update, SampleBatch] = {}
        for update in oldest.values():
            batch = update.take(room if batches else math.inf)
            if batch is not None:
                batches[update] = batch
                room -= batch.size
        sizes = {update: batch.size for update, batch in batches.items()}
        return _Job(sizes, self._pacer.run(self._micro_step(batches), sum(sizes.values())))

    def _micro_step(self, batches: Mapping[Update, SampleBatch]) -> Iterator[Stage]:
        """The stages of a micro-step, which adds the gradients of each batch to those of its update."""
        micro_step = self._forwards.gradients(
            [
                MicroStepInput(
                    pack(batch),
                    update.policy.params,
                    update.policy.scale,
                    update.totals.for_rows(batch.samples),
                    update.gradients,
                )
                for update, batch in batches.items()
            ]
        )
        for (update, batch), result in zip(batches.items(), micro_step.results, strict=True):
            update.add(batch, result)
        yield from micro_step.stages

    def _conclude(self, update: Update) -> Iterator[None]:
        """KL from the base model if it is to be reported, the optimizer step, and the KL of the step if it is bounded.

        The step comes as late as possible, because the new version waits for everything after it.
        """
        config = self.config
        if self._measure_kl and not config.loss.kl_coef:
            for batch in update.sampled_batches():
                kl = yield from self._kl(update, batch, None)
                update.base_kls.append(kl / batch.trained_tokens)
                yield
        update.step(config.optimizer.max_grad_norm)
        if config.gate.kl_bound is not None and not update.skipped:
            for batch in update.batches:
                yield
                kl = yield from self._kl(update, batch, update.after)
                update.step_kls.append(kl)

    def _kl(self, update: Update, batch: SampleBatch, other: PolicyState | None) -> Generator[None, None, float]:
        """The k3 of the policy before the step against another state, or against the base model (None), summed over the
        tokens of one batch.

        The logprobs before the step are those of the micro-step, so it does not matter which version drew the tokens.
        """
        packed = pack(batch)
        spans = None if other is None else [Span(packed.tokens.size, other.params, other.scale)]
        forward = self._forwards.scores([packed], spans)
        kl = k3(update.logprobs[batch], forward.scores[0][0]).sum()
        yield from self._pacer.run(forward.stages(kl), batch.size)
        return cast(float, kl.item())


@dataclass(slots=True)
class _Job:
    """A micro-step, or the end of an update, and the memory that it has taken so far.

    tokens: the tokens of each update that it works on. The updates share its device time in these proportions.
    parts: each step of the iterator runs one part, within one unit.
    finishes: the update that is finished after it, if any.
    kept_bytes: what its parts have left allocated. most_bytes: the most that was allocated for it at one time. Other
        work uses the device between the parts, so what each of them allocates is added up.
    """

    tokens: Mapping[Update, int]
    parts: Iterator[None]
    finishes: Update | None = None
    kept_bytes: int = 0
    most_bytes: int = 0

    def run(self) -> bool:
        """Runs the next part, and measures its time and its memory. Returns whether it was the last one."""
        started, before = time.monotonic(), mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            return next(self.parts, self) is self
        finally:
            self.most_bytes = max(self.most_bytes, self.kept_bytes + mx.get_peak_memory() - before)
            self.kept_bytes += mx.get_active_memory() - before
            seconds_per_token = (time.monotonic() - started) / sum(self.tokens.values())
            for update, tokens in self.tokens.items():
                update.device_seconds += tokens * seconds_per_token
