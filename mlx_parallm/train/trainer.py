"""GRPOTrainer: updates policies on the served base weights, unit by unit.

    accumulate(policy, samples, loss) ─▶ micro-step ─▶ micro-step ─▶ …     forward, backward, gradients added up
    accumulate(policy, samples, loss) ─▶ micro-step ─▶ …
    step(policy, optimizer)           ─▶ clip, AdamW, check ─▶ outcome
    begin(policy, batch)              ─▶ one of each, or several minibatches
    run(parts)                        ─▶ whatever else trains on these weights, such as a reward model

What is asked of one policy is done in order. Each is a generator (see `jobs`), whose parts fit in one unit each (see
`pacing`). Different policies share micro-steps: each takes a batch of samples of what was asked first, and one of every
other policy whose batch still fits. What is asked of no policy takes turns with them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from mlx_parallm.config import ModelConfig, OptimizerConfig, ResolvedLoss, ResolvedTraining
from mlx_parallm.errors import StepFailedError, TrainingFailedError
from mlx_parallm.train.accumulation import Accumulation, Contribution
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome, UpdateSettings
from mlx_parallm.train.forwards import TrainingForwards
from mlx_parallm.train.jobs import Job, JobKind, Jobs, Parts
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.pacing import Pacer
from mlx_parallm.train.packing import SampleBatch, minibatches
from mlx_parallm.train.policy import Policy, PolicySnapshot, PolicyState, check_room

T = TypeVar("T")


class Sized(Protocol):
    """What takes device memory, in bytes."""

    @property
    def nbytes(self) -> int: ...


class GRPOTrainer:
    """Makes the updates of all policies, one unit at a time. Implements `core.TrainingWork`. Device thread only, except
    `peak_bytes`.

    Args:
        lora: rank, alpha and target modules of new adapters.
        measure_kl: report the KL divergence from the base model even if the loss does not read it.
        memory: most bytes that a policy may take while it learns.

    Attributes:
        pacer: computes the stages of what `run` is given.
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
        self.pacer = Pacer()
        self._jobs = Jobs(self._forwards, self.pacer, config, measure_kl)
        self._queue: list[Job[Any]] = []
        self._running: _Running | None = None
        self._others_turn = True
        self._held: WeakSet[Sized] = WeakSet()

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
        work = Accumulation(policy, samples, loss, self.config.micro_batch_tokens, totals, returns_logprobs)
        return self._ask(JobKind.ACCUMULATE, policy, lambda job: self._jobs.accumulate(job, work))

    def step(self, policy: Policy, optimizer: OptimizerConfig) -> Future[UpdateOutcome]:
        """Makes an optimizer step from what the policy has accumulated, and forgets that, whatever comes of the step.

        Its future is completed on the device thread. It raises StepFailedError if the step, or an accumulation that it
        waits for, failed or was abandoned; the policy is as before then.

        Raises:
            ValueError: nothing was accumulated since the last step.
        """
        queued = [job for job in self._queue if job.policy is policy]
        last = list(takewhile(lambda job: job.kind is not JobKind.STEP, reversed(queued)))
        needs = [job for job in last if job.kind is JobKind.ACCUMULATE]
        if not needs and (len(last) < len(queued) or policy not in self._jobs.accumulated):
            raise ValueError("the policy has accumulated no gradients since its last step")
        return self._ask(JobKind.STEP, policy, lambda job: self._jobs.step(job, optimizer), needs)

    def logprobs(self, policy: Policy | None, samples: Sequence[Datum]) -> Future[list[tuple[float, ...]]]:
        """The logprobs of each sample's trained tokens, in nats, under a policy as it is after what was asked of it
        before; None: under the base model.

        The future is completed on the device thread. It raises StepFailedError if this failed or was abandoned.
        """
        return self._ask(JobKind.LOGPROBS, policy, lambda _: self._jobs.logprobs(policy, samples))

    def begin(self, policy: Policy, batch: UpdateBatch) -> Future[UpdateOutcome]:
        """Accumulates a batch and makes a step, with its loss and settings; or several steps, if so many minibatches
        are configured. See `step` for the future."""
        settings = batch.settings or UpdateSettings.of(self.config)
        works = [
            Accumulation(policy, part, batch.loss or settings.loss, settings.micro_batch_tokens)
            for part in minibatches(batch.samples, settings.minibatches)
        ]
        return self._ask(JobKind.UPDATE, policy, lambda job: self._jobs.update(job, batch, works, settings))

    def run(self, parts: Parts[T]) -> Future[T]:
        """Runs what belongs to no policy; micro-steps come between its parts. Its future is completed on the device
        thread, with what `parts` returns or with the TrainingFailedError that it raises; StepFailedError if it failed
        otherwise or was abandoned."""
        return self._ask(JobKind.OTHER, None, lambda _: parts)

    def _ask(
        self,
        kind: JobKind,
        policy: Policy | None,
        parts: Callable[[Job[T]], Parts[T]],
        needs: Sequence[Job[Any]] = (),
    ) -> Future[T]:
        job = Job[T](kind, policy, needs)
        job.parts = parts(job)
        self._queue.append(job)
        return job.future

    def abandon(self, policy: Policy) -> None:
        """Fails what is queued for this policy, and forgets what it has accumulated."""
        self._give_up([job for job in self._queue if job.policy is policy])
        self._jobs.accumulated.pop(policy, None)

    def cancel(self, future: Future[Any]) -> None:
        """Fails what was asked for with this future, if it is not done, and the step that needs it. What the policy had
        accumulated before stays, unless a step that would have used it is among them."""
        self._give_up([job for job in self._queue if job.future is future])

    def _give_up(self, jobs: Sequence[Job[Any]]) -> None:
        """Fails these. A micro-step that others share goes on for them, unless they were given up before."""
        running = self._running
        if running is not None and all(job in jobs or job not in self._queue for job in running.tokens):
            running.parts.close()
            self._running = None
        self._fail(jobs)

    # -- memory ----------------------------------------------------------------------------------

    def hold(self, what: Sized) -> None:
        """Counts the memory of this, as long as somebody refers to it, as held by training."""
        self._held.add(what)

    @property
    def bytes_held(self) -> int:
        """Bytes of all policy states that are still referenced, of accumulated gradients, and of what `hold` was
        given."""
        states = sum(policy.nbytes * len(policy.states) for policy in self.policies.values())
        accumulated = sum(4 * policy.parameters for policy in self._jobs.accumulated)
        return states + accumulated + sum(each.nbytes for each in self._held)

    @property
    def bytes_of_updates(self) -> int:
        """While jobs are queued: bytes of their float32 gradients, and of the other arrays of a pass, whose size is
        known once one was measured."""
        if not self._queue:
            return 0
        learning = {job.policy for job in self._queue if job.kind in (JobKind.ACCUMULATE, JobKind.UPDATE)}
        return 4 * sum(policy.parameters for policy in learning if policy) + self.pacer.pass_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that MLX has held since the process started."""
        return self.pacer.peak_bytes

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self.pacer.budget = seconds

    def advance(self) -> None:
        """Runs one unit: a part of a job or of a micro-step, or several short ones. A job that ends also ends the unit,
        so that its outcome is not delayed."""
        self.pacer.begin()
        more = True
        while more:
            running = self._running = self._running or self._next()
            more = self._run(running) and self.pacer.has_room

    def _run(self, running: _Running) -> bool:
        """Runs the next part. Returns whether another one may run in the same unit."""
        try:
            accumulation = running.run()
        except StopIteration as end:
            self._running = None
            if running.job is not None:
                self._queue.remove(running.job)
                running.job.future.set_result(end.value)
            return running.job is None
        except TrainingFailedError as error:
            assert running.job is not None  # a micro-step raises none
            self._running = None
            self._queue.remove(running.job)
            running.job.future.set_exception(error)
            return False
        if accumulation is None:
            if running.job is not None and running.job.kind is JobKind.OTHER:
                self._running = None  # a micro-step may come between two of its parts
            return False
        assert running.job is not None
        self._running, running.job.accumulation = None, accumulation
        return True

    def reset(self) -> None:
        """Drops what runs now, which failed or is abandoned, and fails the jobs in it. Policies are as before."""
        failed = list(self._running.tokens) if self._running else self._queue[:1]
        self._running = None
        self._fail(failed)

    def _fail(self, jobs: Sequence[Job[Any]]) -> None:
        """Fails these, and what needs one of them. What was accumulated for a step that fails is forgotten."""
        failed: list[Job[Any]] = []
        for job in self._queue:  # what needs another job is behind it
            if job in jobs or any(need in failed for need in job.needs):
                failed.append(job)
        self._queue = [job for job in self._queue if job not in failed]
        for job in failed:
            job.parts.close()
            if job.kind is JobKind.STEP and job.policy is not None:
                self._jobs.accumulated.pop(job.policy, None)
            what = "this" if job.kind is JobKind.OTHER else "the update"
            job.future.set_exception(StepFailedError(f"{what} failed on the device; all is as before"))

    def _next(self) -> _Running:
        """A job that waits for no micro-step, if one is first in the queue of its policy, or if what belongs to no
        policy has its turn. Otherwise a micro-step: a batch of samples of the oldest accumulation, and one of every
        other policy, as long as they fit."""
        first: dict[Policy | None, Job[Any]] = {}
        for job in self._queue:
            first.setdefault(job.policy, job)
        waiting = {job: job.accumulation for job in first.values() if job.accumulation and job.accumulation.pending}
        ready = sorted((job for job in first.values() if job not in waiting), key=lambda job: job.policy is None)
        if ready and (self._others_turn or ready[0].policy is not None or not waiting):
            self._others_turn = ready[0].policy is not None
            return _Running(ready[0].parts, {ready[0]: 1}, ready[0])
        self._others_turn = True
        room: float = math.inf
        batches: dict[Job[Any], SampleBatch] = {}
        for job, accumulation in waiting.items():
            if (batch := accumulation.take(room)) is not None:
                room = min(room, self.config.micro_batch_tokens) - batch.size
                batches[job] = batch
        parts = self._jobs.micro_step({waiting[job]: batch for job, batch in batches.items()})
        return _Running(parts, {job: batch.size for job, batch in batches.items()})


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs now: the parts of a job, or those of a micro-step of several jobs.

    tokens: of each job in it. Its device time is charged in these proportions. job: the one whose parts they are.
    """

    parts: Generator[Accumulation | None, None, Any]
    tokens: Mapping[Job[Any], int]
    job: Job[Any] | None = None

    def run(self) -> Accumulation | None:
        """Runs the next part, and measures its time. Raises StopIteration, with the result, after the last one."""
        started = time.monotonic()
        for job in self.tokens:
            job.resumed_at = started
        try:
            return next(self.parts)
        finally:
            seconds_per_token = (time.monotonic() - started) / sum(self.tokens.values())
            for job, tokens in self.tokens.items():
                job.charged_seconds += tokens * seconds_per_token
                job.resumed_at = None
