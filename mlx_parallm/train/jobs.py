"""The jobs of the trainer: what is computed before, in and after the micro-steps of an accumulation, for a step, and
for logprobs."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from mlx_parallm.train.accumulation import Accumulated, Accumulation
from mlx_parallm.train.context import Span
from mlx_parallm.train.forwards import MicroStepInput, TrainingForwards
from mlx_parallm.train.job_memory import JobMemory
from mlx_parallm.train.logprobs import Logprobs
from mlx_parallm.train.losses import k3
from mlx_parallm.train.pacing import Pacer, Stage
from mlx_parallm.train.packing import SampleBatch, pack
from mlx_parallm.train.policy import PolicyState
from mlx_parallm.train.step import Step

Work = Accumulation | Step | Logprobs


@dataclass(slots=True)
class Job:
    """Work on an accumulation, a step or logprobs, and the memory that it has taken so far.

    tokens: the tokens of all that it works on. Its device time is charged in these proportions.
    parts: each step of the iterator runs one part, within one unit.
    finishes: what is finished after it, if anything.
    """

    tokens: Mapping[Work, int]
    parts: Iterator[None]
    finishes: Work | None = None
    memory: JobMemory = field(default_factory=JobMemory)

    def run(self) -> bool:
        """Runs the next part, and measures its time and its memory. Returns whether it was the last one."""
        started = time.monotonic()
        try:
            with self.memory.part():
                return next(self.parts, self) is self
        finally:
            seconds_per_token = (time.monotonic() - started) / sum(self.tokens.values())
            for work, tokens in self.tokens.items():
                work.device_seconds += tokens * seconds_per_token


class Jobs:
    """Makes jobs.

    Args:
        measure_base: report the KL divergence from the base model even if the loss does not read it. This costs one
            more forward pass over a random quarter of the sample batches.
    """

    def __init__(self, forwards: TrainingForwards, pacer: Pacer, measure_base: bool) -> None:
        self._forwards = forwards
        self._pacer = pacer
        self._measure_base = measure_base

    def micro_step(self, batches: Mapping[Accumulation, SampleBatch]) -> Job:
        """Adds the gradients of one sample batch of each accumulation to those before them."""
        sizes: dict[Work, int] = {work: batch.size for work, batch in batches.items()}
        return Job(sizes, self._pacer.run(self._micro_step(batches), sum(sizes.values())))

    def estimate(self, work: Accumulation) -> Job:
        """Computes the KL estimate that the loss of an accumulation needs before its first micro-step."""
        return Job({work: 1}, self._estimate(work))

    def end(self, work: Accumulation) -> Job:
        """Ends an accumulation whose micro-steps are all done."""
        return Job({work: 1}, self._end(work), finishes=work)

    def step(self, step: Step, accumulated: Accumulated) -> Job:
        return Job({step: 1}, self._step(step, accumulated), finishes=step)

    def logprobs(self, work: Logprobs) -> Job:
        return Job({work: 1}, self._logprobs(work), finishes=work)

    def _micro_step(self, batches: Mapping[Accumulation, SampleBatch]) -> Iterator[Stage]:
        """The stages of a micro-step, which adds the gradients of each batch to those before it."""
        micro_step = self._forwards.gradients(
            [
                MicroStepInput(
                    work.packed(batch),
                    work.policy.state,
                    work.loss,
                    work.totals,
                    work.gradients,
                    work.kl_estimate or 0.0,
                )
                for work, batch in batches.items()
            ]
        )
        for (work, batch), result in zip(batches.items(), micro_step.results, strict=True):
            work.add(batch, result)
        yield from micro_step.stages

    def _estimate(self, work: Accumulation) -> Iterator[None]:
        """Estimates the KL divergence of whole answers from the base model, from answers to other prompts."""
        total, state = 0.0, work.policy.state
        for number, batch in enumerate(work.mismatched):
            if number:
                yield
            packed = pack(batch)
            policy = self._forwards.scores([packed], [Span(packed.tokens.size, state.params, state.scale)])
            base = self._forwards.scores([packed], None)
            ours, theirs = policy.scores[0][0], base.scores[0][0]
            change = (packed.padded(ours - theirs) * packed.weights).sum()
            yield from self._pacer.run([*policy.stages(ours), *base.stages(change)], batch.size)
            total += cast(float, change.item())
        work.kl_estimate = max(0.0, total / sum(len(batch.samples) for batch in work.mismatched))

    def _end(self, work: Accumulation) -> Iterator[None]:
        """Ends an accumulation: measures the KL from the base model, if that is reported and not part of the loss."""
        if self._measure_base and not work.returns_logprobs and not work.loss.reads_reference:
            for number, batch in enumerate(work.sampled_batches()):
                if number:
                    yield
                kl = yield from self._kl(work, batch, None)
                work.base_kls.append(kl / batch.trained_tokens)

    def _step(self, step: Step, accumulated: Accumulated) -> Iterator[None]:
        """Makes a step, and measures its KL over a sample of the accumulations that it names. It is moved back and
        measured again until it is short enough."""
        step.run(accumulated)
        while step.measured and not step.skipped:
            yield from self._measure(step)
            if not step.move_back():
                break
        yield from ()  # makes this a generator even if nothing is measured

    def _measure(self, step: Step) -> Iterator[None]:
        """Estimates the KL of a step, in nats per token."""
        total = 0.0
        for part in step.measured:
            kls = []
            for batch in part.sampled_batches():
                yield
                kl = yield from self._kl(part, batch, step.after)
                kls.append(kl / batch.trained_tokens)
            total += part.trained_tokens * sum(kls) / len(kls)
        step.kl = total / sum(part.trained_tokens for part in step.measured)

    def _logprobs(self, work: Logprobs) -> Iterator[None]:
        """Computes logprobs, batch by batch."""
        for number, batch in enumerate(work.batches):
            if number:
                yield
            packed, state = pack(batch), work.policy and work.policy.state
            spans = None if state is None else [Span(packed.tokens.size, state.params, state.scale)]
            forward = self._forwards.scores([packed], spans)
            logprobs = forward.scores[0][0]
            yield from self._pacer.run(forward.stages(logprobs), batch.size)
            work.add(batch, logprobs)

    def _kl(self, work: Accumulation, batch: SampleBatch, other: PolicyState | None) -> Generator[None, None, float]:
        """The KL divergence (k3 estimator) of the policy before the update from another state, or from the base model
        (None), summed over the tokens of one batch.

        The logprobs before the update are the trainer's own, so it does not matter which version drew the tokens.
        """
        packed = pack(batch)
        spans = None if other is None else [Span(packed.tokens.size, other.params, other.scale)]
        forward = self._forwards.scores([packed], spans)
        kl = k3(work.old_logprobs(batch), forward.scores[0][0]).sum()
        yield from self._pacer.run(forward.stages(kl), batch.size)
        return cast(float, kl.item())
