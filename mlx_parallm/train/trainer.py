"""GRPOTrainer: updates policies on the served base weights, unit by unit.

    accumulate(policy, samples, loss) ─▶ micro-step ─▶ micro-step ─▶ …     forward, backward, gradients added up
    accumulate(policy, samples, loss) ─▶ micro-step ─▶ …
    step(policy, optimizer)           ─▶ clip, AdamW, check ─▶ outcome
    begin(policy, batch)              ─▶ one of each, or several minibatches

The trainer works on one job after another (see `jobs`), which is cut into parts that fit in one unit each (see
`pacing`). What is asked of one policy is done in order. Different policies share micro-steps: each takes a batch of
samples of what was asked first, and one of every other policy whose batch still fits.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any

import mlx.core as mx

from mlx_parallm.config import LossKind, ModelConfig, OptimizerConfig, ResolvedLoss, ResolvedTraining
from mlx_parallm.errors import StepFailedError
from mlx_parallm.train.accumulation import Accumulated, Accumulation, Contribution
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome
from mlx_parallm.train.forwards import TrainingForwards
from mlx_parallm.train.jobs import Job, Jobs, Work
from mlx_parallm.train.logprobs import Logprobs
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.pacing import Pacer
from mlx_parallm.train.packing import SampleBatch, minibatches
from mlx_parallm.train.policy import Policy, PolicySnapshot, PolicyState, check_room
from mlx_parallm.train.step import Step
from mlx_parallm.train.update import Update

_MEASURED_JOBS = 16
"""Jobs whose memory is remembered."""


class GRPOTrainer:
    """Makes the updates of all policies, one unit at a time. Implements `core.TrainingWork`. Device thread only, except
    `peak_bytes`.

    Args:
        lora: rank, alpha and target modules of new adapters.
        measure_kl: report the KL divergence from the base model even if the loss does not read it.
        memory: most bytes that a policy may take while it learns.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: ResolvedTraining,
        lora: ModelConfig,
        measure_kl: bool = True,
        memory: int = sys.maxsize,
    ) -> None:
        self.model = model
        self.config = config
        self.lora = lora
        self.memory = memory
        self.policies: dict[str, Policy] = {}
        self._forwards = TrainingForwards(model)
        self._pacer = Pacer()
        self._jobs = Jobs(self._forwards, self._pacer, measure_kl)
        self._queue: list[Work] = []
        self._accumulated: dict[Policy, Accumulated] = {}
        self._job: Job | None = None
        self._job_bytes = deque([0], maxlen=_MEASURED_JOBS)
        self._peak_bytes = 0

    # -- policies --------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        start: PolicySnapshot | None = None,
        lora: ModelConfig | None = None,
        seed: int | None = None,
    ) -> Policy:
        """Makes a new policy of this name, in place of an earlier one, which is closed. Raises what `check_room` and
        `Policy` raise.

        `lora`: its rank, alpha and targets. `seed`: of its initial weights. None: those of the trainer.
        """
        lora = lora or self.lora
        check_room(self.model.layout, lora, self.memory)
        policy = Policy(self.model.layout, lora, self.config.seed if seed is None else seed, start)
        self.close(name)
        self.policies[name] = policy
        return policy

    def restore(self, name: str, goal: PolicyState | PolicySnapshot | None) -> None:
        """Sets a policy to a state or a snapshot; None: to a new policy, equal to the base model. What is queued for it
        and what it has accumulated are of the weights before, and are discarded.

        Raises:
            InvalidRequestError: see `Policy.restore`; nothing has changed.
        """
        policy = self.policies[name]
        state = policy.state_of(goal)
        self.abandon(policy)
        policy.restore(state)

    def close(self, name: str) -> None:
        """Fails what is queued for a policy, and forgets it. Does nothing if there is none."""
        if (policy := self.policies.pop(name, None)) is not None:
            self.abandon(policy)

    def accumulate(
        self,
        policy: Policy,
        samples: Sequence[Datum],
        loss: ResolvedLoss,
        totals: UpdateTotals | None = None,
        returns_logprobs: bool = False,
    ) -> Future[Contribution]:
        """Adds the gradients of these samples to those that the policy has accumulated since its last step.

        Args:
            totals: what the loss is divided by, if these are not all samples of the step.
            returns_logprobs: whether the contribution has the logprobs of the samples, in place of the KL divergence
                from the base model.

        Returns:
            What these samples contribute. The future is completed on the device thread. It raises StepFailedError if
            this failed or was abandoned; then the policy has accumulated what it had before.
        """
        tokens = self.config.micro_batch_tokens
        work = Accumulation(policy, samples, loss, tokens, totals, returns_logprobs=returns_logprobs)
        self._queue.append(work)
        return work.future

    def step(self, policy: Policy, optimizer: OptimizerConfig) -> Future[UpdateOutcome]:
        """Makes an optimizer step from what the policy has accumulated, and forgets that, whatever comes of the step.

        Its future is completed on the device thread. It raises StepFailedError if the step, or an accumulation that it
        waits for, failed or was abandoned; the policy is as before then.

        Raises:
            ValueError: nothing was accumulated since the last step.
        """
        queued = [work for work in self._queue if work.policy is policy]
        last = list(takewhile(lambda work: not isinstance(work, Step), reversed(queued)))
        waited_for = [work for work in last if isinstance(work, Accumulation)]
        if not waited_for and (len(last) < len(queued) or policy not in self._accumulated):
            raise ValueError("the policy has accumulated no gradients since its last step")
        work = Step(policy, optimizer, needs=waited_for)
        self._queue.append(work)
        return work.future

    def logprobs(self, policy: Policy | None, samples: Sequence[Datum]) -> Future[list[tuple[float, ...]]]:
        """The logprobs of each sample's trained tokens, in nats, under a policy as it is after what was asked of it
        before; None: under the base model.

        The future is completed on the device thread. It raises StepFailedError if this failed or was abandoned.
        """
        work = Logprobs(policy, samples, self.config.micro_batch_tokens)
        self._queue.append(work)
        return work.future

    def begin(self, policy: Policy, batch: UpdateBatch) -> Future[UpdateOutcome]:
        """Accumulates a batch and makes a step, with its loss and the configured optimizer; or several steps, if so
        many minibatches are configured. See `step` for the future."""
        config = self.config
        loss, optimizer = batch.loss or config.loss, config.optimizer.at(batch.learning_rate)
        limited = optimizer.max_kl_step is not None or config.divergence.kl_step.limit is not None
        measures_kl = loss.kind is LossKind.POLICY_GRADIENT and limited
        parts = minibatches(batch.samples, config.minibatches)
        if len(parts) > 1:
            update = Update(policy, batch, parts, config, optimizer, measures_kl)
            self._queue += update.works
            return update.future
        gradients = Accumulation(policy, batch.samples, loss, config.micro_batch_tokens)
        measured = [gradients] if measures_kl else []
        step = Step(
            policy,
            optimizer,
            batch.step_scale,
            batch.metrics,
            needs=[gradients],
            measured=measured,
            needs_gradient=True,
        )
        self._queue += gradients, step
        return step.future

    def abandon(self, policy: Policy) -> None:
        """Fails what is queued for this policy, and forgets what it has accumulated."""
        self._give_up([work for work in self._queue if work.policy is policy])
        self._accumulated.pop(policy, None)

    def cancel(self, future: Future[Any]) -> None:
        """Fails what was asked for with this future, if it is not done, and the steps that need it. What the policy had
        accumulated before stays, unless a step that would have used it is among them."""
        self._give_up([work for work in self._queue if work.future is future])

    def _give_up(self, works: Sequence[Work]) -> None:
        """Fails these. A micro-step that others share goes on for them."""
        if self._job is not None and all(work in works for work in self._job.tokens):
            self._forget_job()
        self._fail(works)

    @property
    def bytes_held(self) -> int:
        """Bytes of all policy states that are still referenced, and of accumulated gradients. Those of a policy whose
        step is next are in `bytes_of_updates`."""
        states = sum(policy.nbytes * len(policy.states) for policy in self.policies.values())
        accumulating = {work.policy for work in self._queue if isinstance(work, Accumulation)}
        stepping = {work.policy for work in self._queue if isinstance(work, Step)} - accumulating
        return states + sum(4 * policy.parameters for policy in self._accumulated if policy not in stepping)

    @property
    def bytes_of_updates(self) -> int:
        """While work is queued: bytes of its float32 gradients, and of the other arrays of a micro-step, whose size is
        known once a micro-step was measured."""
        if not self._queue:
            return 0
        learning = {work.policy for work in self._queue if not isinstance(work, Logprobs)}
        gradients = 4 * sum(policy.parameters for policy in learning)
        return gradients + max(*self._job_bytes, self._job.memory.most if self._job else 0)

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
        """Runs one unit: a part of a job, or several short jobs. A job that finishes something also ends the unit, so
        that its outcome is not delayed."""
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

    def _complete(self, work: Work) -> None:
        """Takes the result over, and completes the future. Nothing may fail once the work has left the queue."""
        if isinstance(work, Logprobs):
            logprobs = work.result()
            self._leave(work)
            work.future.set_result(logprobs)
            return
        if isinstance(work, Accumulation):
            accumulated = Accumulated.of(work, self._accumulated.get(work.policy))
            contribution = work.contribution()
            self._leave(work)
            self._accumulated[work.policy] = accumulated
            work.future.set_result(contribution)
            return
        outcome = work.outcome(self._accumulated[work.policy])
        self._leave(work)
        del self._accumulated[work.policy]
        if work.after is not None:
            work.policy.restore(work.after)
        work.future.set_result(outcome)

    def _leave(self, work: Work) -> None:
        self._forget_job()
        self._queue.remove(work)

    def reset(self) -> None:
        """Drops the current job, which failed or is abandoned, and fails what it works on. Policies are as before."""
        failed = list(self._job.tokens) if self._job else self._queue[:1]
        self._forget_job()
        self._fail(failed)

    def _forget_job(self) -> None:
        if self._job is not None:
            self._job_bytes.append(self._job.memory.most - max(self._job.memory.kept, 0))
        self._job = None

    def _fail(self, works: Sequence[Work]) -> None:
        """Fails these, and what needs one of them. What was accumulated for a step that fails is forgotten."""
        failed: list[Work] = []
        for work in self._queue:  # what needs another work is behind it
            if work in works or any(need in failed for need in work.needs):
                failed.append(work)
        self._queue = [work for work in self._queue if work not in failed]
        for work in failed:
            if isinstance(work, Step):
                self._accumulated.pop(work.policy, None)
            work.future.set_exception(StepFailedError("the update failed on the device; the policy is as before"))

    # -- jobs ------------------------------------------------------------------------------------

    def _next_job(self) -> Job:
        """A step, logprobs, or what comes before or after the micro-steps of an accumulation, if one is first in the
        queue of its policy. Otherwise a micro-step: a batch of samples of the oldest accumulation, and one of every
        other policy, as long as they fit."""
        oldest: dict[Policy | None, Work] = {}
        for work in self._queue:
            oldest.setdefault(work.policy, work)
        gathering: list[Accumulation] = []
        for work in oldest.values():
            if isinstance(work, Step):
                return self._jobs.step(work, self._accumulated[work.policy])
            if isinstance(work, Logprobs):
                return self._jobs.logprobs(work)
            if work.kl_estimate is None:
                return self._jobs.estimate(work)
            if not work.pending:
                return self._jobs.end(work)
            gathering.append(work)
        room: float = self.config.micro_batch_tokens
        batches: dict[Accumulation, SampleBatch] = {}
        for each in gathering:
            batch = each.take(room if batches else math.inf)
            if batch is not None:
                batches[each] = batch
                room -= batch.size
        return self._jobs.micro_step(batches)
