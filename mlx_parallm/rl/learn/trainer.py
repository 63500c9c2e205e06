"""GRPOTrainer: updates policies on the served base weights, unit by unit. Learner: its interface for the event loop.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ outcome
                            forward, backward, gradients added up

The trainer works on one job after another: a micro-step, or the end of an update. A job is cut into parts that fit in
one unit each (see `pacing`). Updates of one policy follow each other. Updates of different policies share micro-steps:
each micro-step takes a batch of samples of the oldest update, and one of every other update whose batch still fits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import cast

import mlx.core as mx

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import ModelConfig, ResolvedTraining
from mlx_parallm.core import AdapterRef, DeviceThread, completed, then
from mlx_parallm.errors import EngineDeadError, StepFailedError
from mlx_parallm.rl.events import UpdateOutcome
from mlx_parallm.rl.learn.forwards import MicroStepInput, Stage, TrainingForwards
from mlx_parallm.rl.learn.model import Span, TrainableModel
from mlx_parallm.rl.learn.pacing import Job, Pacer
from mlx_parallm.rl.learn.packing import SampleBatch, pack
from mlx_parallm.rl.learn.policy import Policy, PolicySnapshot, PolicyState
from mlx_parallm.rl.learn.update import Update
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.token_losses import k3

_MEASURED_JOBS = 16
"""Jobs whose memory is remembered."""

Publish = Callable[[UpdateOutcome, AdapterWeights], Future[AdapterRef] | None]
"""Publishes the weights of a finished update, or returns None if they are not to go live. On the device thread."""

_log = logging.getLogger(__name__)


class GRPOTrainer:
    """Makes the updates of all policies, one unit at a time. Implements `core.TrainingWork`. Device thread only, except
    `peak_bytes`.

    Args:
        lora: rank, alpha and target modules of new adapters.
        measure_kl: report the KL divergence from the base model even if it has no weight in the loss. This costs one
            more forward pass over a random quarter of the micro-batches.
    """

    def __init__(
        self, model: TrainableModel, config: ResolvedTraining, lora: ModelConfig, measure_kl: bool = True
    ) -> None:
        self.model = model
        self.config = config
        self.lora = lora
        self.policies: dict[str, Policy] = {}
        self._measure_kl = measure_kl
        self._forwards = TrainingForwards(model, config.loss)
        self._pacer = Pacer()
        self._queue: list[Update] = []
        self._job: Job | None = None
        self._job_bytes = deque([0], maxlen=_MEASURED_JOBS)
        self._peak_bytes = 0

    # -- policies --------------------------------------------------------------------------------

    def open(self, name: str, start: PolicySnapshot | None = None) -> Policy:
        """Makes a new policy of this name, in place of an earlier one. Raises what `Policy` raises."""
        policy = Policy(self.model.layout, self.lora, self.config.optimizer, self.config.seed, start)
        self.policies[name] = policy
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
        """Bytes of all policy states that are still referenced."""
        return sum(policy.nbytes * len(policy.states) for policy in self.policies.values())

    @property
    def bytes_of_updates(self) -> int:
        """While updates wait: bytes of their float32 gradients, and of the other arrays of a micro-step, whose size is
        known once a micro-step was measured."""
        if not self._queue:
            return 0
        gradients = 4 * sum(policy.parameters for policy in {update.policy for update in self._queue})
        return gradients + max(*self._job_bytes, self._job.most_bytes if self._job else 0)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that MLX has held since the process started. Running a job resets MLX's own counter."""
        return max(self._peak_bytes, mx.get_peak_memory())

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self._pacer.budget = seconds

    def advance(self) -> None:
        """Runs one unit: a part of a job, or several short jobs. The end of an update also ends the unit, so that its
        outcome is not delayed."""
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
        """Drops the current job, which failed or is abandoned, and fails its updates. Their policies are as before."""
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

    def _next_job(self) -> Job:
        """The end of an update whose micro-steps are all done, if there is one. Otherwise a micro-step: a batch of
        samples of the oldest update, and one of the oldest update of every other policy, as long as they fit."""
        oldest: dict[Policy, Update] = {}
        for update in self._queue:
            oldest.setdefault(update.policy, update)
        for update in oldest.values():
            if not update.pending:
                return Job({update: 1}, self._conclude(update), finishes=update)
        room: float = self.config.micro_batch_tokens
        batches: dict[Update, SampleBatch] = {}
        for update in oldest.values():
            batch = update.take(room if batches else math.inf)
            if batch is not None:
                batches[update] = batch
                room -= batch.size
        sizes = {update: batch.size for update, batch in batches.items()}
        return Job(sizes, self._pacer.run(self._micro_step(batches), sum(sizes.values())))

    def _micro_step(self, batches: Mapping[Update, SampleBatch]) -> Iterator[Stage]:
        """The stages of a micro-step, which adds the gradients of each batch to those of its update."""
        micro_step = self._forwards.gradients(
            [
                MicroStepInput(pack(batch), each.policy.state, each.totals.for_rows(batch.samples), each.gradients)
                for each, batch in batches.items()
            ]
        )
        for (update, batch), result in zip(batches.items(), micro_step.results, strict=True):
            update.add(batch, result)
        yield from micro_step.stages

    def _conclude(self, update: Update) -> Iterator[None]:
        """Ends an update: measures the KL from the base model if it is to be reported, makes the optimizer step, and
        measures the KL of the step if it is bounded.

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
        """The KL divergence (k3 estimator) of the policy before the step from another state, or from the base model
        (None), summed over the tokens of one batch.

        The logprobs before the step are those of the micro-step, so it does not matter which version drew the tokens.
        """
        packed = pack(batch)
        spans = None if other is None else [Span(packed.tokens.size, other.params, other.scale)]
        forward = self._forwards.scores([packed], spans)
        kl = k3(update.logprobs[batch], forward.scores[0][0]).sum()
        yield from self._pacer.run(forward.stages(kl), batch.size)
        return cast(float, kl.item())


class Learner:
    """The event loop's access to the policies in training, by adapter name. A name that is not open raises KeyError.

    Updates of one adapter run one after the other; updates of different adapters share micro-steps.
    """

    def __init__(self, device: DeviceThread, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self._device = device

    async def open(self, name: str, start: PolicySnapshot | None) -> None:
        """Starts training from this policy; None: from a new one, equal to the base model.

        Raises:
            ConfigError: the model has no linear layer with the name of a target module.
            InvalidRequestError: `start` has another rank, alpha or targets than those configured.
        """
        trainer, lora = self.trainer, self.trainer.lora
        policy = await self._device.run(lambda: trainer.open(name, start))
        _log.info(
            "training %s: %d numbers, rank %d, alpha %g, on %s; nothing else has a gradient",
            *(name, policy.parameters, lora.lora_rank, lora.lora_alpha, ", ".join(lora.lora_target_modules)),
        )

    async def learn(
        self, name: str, batch: UpdateBatch, publish: Publish | None = None
    ) -> tuple[UpdateOutcome, AdapterRef | None]:
        """Makes one update, in micro-steps between decode steps. `publish` is called right after it on the device
        thread, because a trip to the event loop and back would take a decode step. If the caller is cancelled, an
        update that is not finished is abandoned.

        Returns:
            The outcome, and the version that `publish` made of it, if any.

        Raises:
            StepFailedError: the update failed on the device; the policy is as before.
            Exception: raised by `publish`; the policy has changed.
        """
        policy = self.trainer.policies[name]

        def publish_outcome(outcome: UpdateOutcome) -> Future[tuple[UpdateOutcome, AdapterRef | None]]:
            live = publish(outcome, policy.weights()) if publish else None
            return completed((outcome, None)) if live is None else then(live, lambda ref: (outcome, ref))

        try:
            return await self._device.run(lambda: then(self.trainer.begin(policy, batch), publish_outcome))
        except asyncio.CancelledError:
            with suppress(EngineDeadError):
                await self._device.run(lambda: self.trainer.abandon(policy))
            raise

    def state(self, name: str) -> PolicyState:
        """The current policy by reference. Nothing is copied; its memory is in use while the state is referenced."""
        return self.trainer.policies[name].state

    async def snapshot(self, state: PolicyState | PolicySnapshot) -> PolicySnapshot:
        """A copy in host memory, made in parts; requests and updates continue between them."""
        if isinstance(state, PolicySnapshot):
            return state
        parts = state.copied()
        while (copy := await self._device.run(lambda: next(parts))) is None:
            pass
        return copy

    async def restore(self, name: str, goal: PolicyState | PolicySnapshot | None) -> None:
        """Goes back to a state or a checkpoint; None: to a new policy, equal to the base model.

        Raises:
            InvalidRequestError: the checkpoint has another rank, alpha or targets than those configured.
        """
        await self._device.run(lambda: self.trainer.policies[name].restore(goal))

    def weights(self, name: str) -> AdapterWeights:
        """The current weights as MLX arrays, which only the device thread may read."""
        return self.trainer.policies[name].weights()
