"""GRPOTrainer: updates of policies on the served base weights, as units of device work.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ outcome
                            forward, backward, gradients added up

A micro-step is cut into units that keep to a latency budget (see `pacing`). Updates of one policy follow each other.
Updates of different policies share micro-steps: each micro-step takes a batch of samples of the oldest update, and one
of every other update whose batch still fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from mlx_parallm.config import ModelConfig, ResolvedTraining
from mlx_parallm.rl.events import UpdateOutcome
from mlx_parallm.rl.learn.forwards import MicroStepInput, TrainingForwards
from mlx_parallm.rl.learn.model import Span, TrainableModel
from mlx_parallm.rl.learn.pacing import MicroStepMemory, Pacer, Stage, StageKind
from mlx_parallm.rl.learn.packing import SampleBatch, pack
from mlx_parallm.rl.learn.policy import Policy, PolicySnapshot
from mlx_parallm.rl.learn.update import Update
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.losses import k3


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
        self._update_bytes = 0
        self._forwards = TrainingForwards(model, config.loss)
        self._pacer = Pacer()
        self._memory = MicroStepMemory()
        self._policies: dict[str, Policy] = {}
        self._queue: list[Update] = []
        self._job: Iterator[None] | None = None
        self._job_updates: dict[Update, int] = {}  # the updates that the job works on, and their parts of it in tokens

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
        update = Update(policy, batch)
        self._queue.append(update)
        self._count_bytes()
        return update.future

    def abandon(self, policy: Policy) -> None:
        """Fails the updates of this policy, and those that share the current micro-step with one of them."""
        if any(update.policy is policy for update in self._job_updates):
            self.reset()
        abandoned = [update for update in self._queue if update.policy is policy]
        self._queue = [update for update in self._queue if update.policy is not policy]
        self._count_bytes()
        for update in abandoned:
            update.fail()

    @property
    def bytes_held(self) -> int:
        """Bytes of all states of policies that something holds, and while updates wait, of gradients and the
        activations of a micro-step."""
        states = sum(policy.nbytes * len(policy.states) for policy in self._policies.values())
        return states + self._update_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak of MLX's memory since start. MLX's own counter is reset whenever a unit of training is measured."""
        return self._memory.peak

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self._pacer.budget = seconds

    def advance(self) -> None:
        """Runs one unit: a part of a micro-step or of the end of an update, and more of them if there is time. It ends
        when an update is finished, because its outcome is waited for."""
        self._pacer.begin()
        finished = self._run_part()
        while not finished and self._job is None and self._queue and self._pacer.has_room:
            finished = self._run_part()
        outcomes = [(update, update.outcome()) for update in finished]
        for update in finished:
            self._queue.remove(update)
            update.apply()
        self._count_bytes()
        for update, outcome in outcomes:
            update.future.set_result(outcome)

    def _run_part(self) -> list[Update]:
        """Runs the next part of the current job, or of a new one. Returns the updates that are finished."""
        started = time.monotonic()
        if self._job is None:
            self._memory.begin()
            self._job = self._next_job()
        with self._memory.measured():
            ended = next(self._job, self) is self
        self._share_time(time.monotonic() - started)
        finished = [update for update in self._job_updates if ended and update.finished]
        if ended:
            self._end_job()
        return finished

    def reset(self) -> None:
        """Fails the updates that the failed unit worked on. Their policies are as before."""
        failed = [update for update in self._queue if update in self._job_updates or update.finished]
        failed = failed or self._queue[:1]
        self._end_job()
        for update in failed:
            self._queue.remove(update)
        self._count_bytes()
        for update in failed:
            update.fail()

    def _next_job(self) -> Iterator[None]:
        """The end of an update whose micro-steps are all done, or a micro-step."""
        updates = self._started_updates()
        done = next((update for update in updates if not update.pending), None)
        return self._micro_step(updates) if done is None else self._conclude(done)

    def _started_updates(self) -> list[Update]:
        """The oldest update of each policy, in order of arrival. Starts those that are not started."""
        oldest: dict[Policy, Update] = {}
        for update in self._queue:
            oldest.setdefault(update.policy, update)
        for update in oldest.values():
            if not update.started:
                self._job_updates = {update: 1}  # if it cannot be started, only this one fails
                update.start(self.config.micro_batch_tokens)
        return list(oldest.values())

    def _end_job(self) -> None:
        self._job, self._job_updates = None, {}
        self._memory.end()

    def _share_time(self, seconds: float) -> None:
        """Divides the time of a part among the updates that it worked on."""
        whole = sum(self._job_updates.values())
        for update, tokens in self._job_updates.items():
            update.device_seconds += seconds * tokens / whole

    def _count_bytes(self) -> None:
        training = {update.policy for update in self._queue}
        gradients = sum(policy.gradient_nbytes for policy in training)
        self._update_bytes = gradients + self._memory.working if training else 0

    # -- micro-steps -----------------------------------------------------------------------------

    def _micro_step(self, updates: Sequence[Update]) -> Iterator[None]:
        parts = self._take(updates)
        self._job_updates = {update: batch.size for update, batch in parts}
        yield from self._pacer.run(self._stages(parts), sum(self._job_updates.values()))

    def _take(self, updates: Sequence[Update]) -> list[tuple[Update, SampleBatch]]:
        """One batch of samples of the oldest update, and one of each other update as long as they fit."""
        room: float = self.config.micro_batch_tokens
        parts: list[tuple[Update, SampleBatch]] = []
        for update in updates:
            batch = update.take(room if parts else math.inf)
            if batch is not None:
                parts.append((update, batch))
                room -= batch.size
        return parts

    def _stages(self, parts: Sequence[tuple[Update, SampleBatch]]) -> list[Stage]:
        """The stages of forward and backward pass, and of adding up the gradients. After this, only the updates refer
        to the gradients, so that MLX adds in place."""
        inputs = [
            MicroStepInput(
                pack(batch), update.policy.params, update.policy.scale, update.totals.for_rows(batch.samples)
            )
            for update, batch in parts
        ]
        micro_step = self._forwards.gradients(inputs)
        for (update, batch), result in zip(parts, micro_step.results, strict=True):
            update.add(batch, result)
        return [*micro_step.stages, *self._backward([update for update, _ in parts])]

    def _backward(self, updates: Sequence[Update]) -> Iterator[Stage]:
        """The stages of the backward pass: one for each layer with its gradients, from the top down."""
        kind = StageKind.HEAD_BACKWARD
        for paths in reversed(self.model.layer_paths):
            if leaves := [leaf for update in updates for leaf in update.gradients(paths)]:
                yield Stage(kind, leaves)
                kind = StageKind.BACKWARD

    # -- the end of an update --------------------------------------------------------------------

    def _conclude(self, update: Update) -> Iterator[None]:
        """KL from the base model if it is to be reported, the optimizer step, and the KL of the step if it is bounded.

        The step comes as late as possible, because the new version waits for everything after it.
        """
        config = self.config
        self._job_updates = {update: 1}
        if self._measure_kl and not config.loss.kl_coef:
            for batch in update.sampled_batches():
                yield from self._measure_base_kl(update, batch)
                yield
        update.step(config.optimizer.max_grad_norm)
        if config.gate.kl_bound is not None and not update.skipped:
            for batch in update.all_batches:
                yield
                yield from self._measure_step_kl(update, batch)
        update.finished = True

    def _measure_base_kl(self, update: Update, batch: SampleBatch) -> Iterator[None]:
        """Adds the mean k3 of the policy before the step against the base model, over the tokens of one batch."""
        forward = self._forwards.scores([pack(batch)], None)
        kl = k3(update.logprobs[batch], forward.scores[0][0]).mean()
        yield from self._pacer.run(forward.stages(kl), batch.size)
        update.add_base_kl(kl)

    def _measure_step_kl(self, update: Update, batch: SampleBatch) -> Iterator[None]:
        """Adds the k3 of the policy before the step against the one after it, summed over the tokens of one batch.

        The logprobs before the step are those of the micro-step, so it does not matter which version drew the tokens.
        """
        assert update.after is not None
        packed = pack(batch)
        forward = self._forwards.scores([packed], [Span(packed.tokens.size, update.after.params, update.policy.scale)])
        kl = k3(update.logprobs[batch], forward.scores[0][0]).sum()
        yield from self._pacer.run(forward.stages(kl), batch.size)
        update.add_step_kl(kl)
