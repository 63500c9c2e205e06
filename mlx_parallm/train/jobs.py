"""What the trainer is asked for, as generators that yield between units of device work.

    accumulate   micro-step ─▶ micro-step ─▶ … ─▶ (KL from the base model) ─▶ gradients for the next step
    step         clip ─▶ AdamW ─▶ check ─▶ (KL of the step ─▶ moved back, if it is too long) ─▶ the policy changes
    update       (logprobs) ─▶ accumulate ─▶ step ─▶ accumulate ─▶ step ─▶ …    one for each minibatch; all, or none
    logprobs     forward ─▶ forward ─▶ …

A policy does not change before a step is finished, so a job that fails or is abandoned needs no undoing, except an
update of several steps: it restores the policy when its generator is closed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_parallm.config import LossKind, OptimizerConfig, ResolvedTraining
from mlx_parallm.train.accumulation import (
    Accumulated,
    Accumulation,
    Contribution,
    SampleLogprobs,
    metrics,
    of_samples,
)
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome, UpdateSettings
from mlx_parallm.train.forwards import MicroStepInput, TrainingForwards
from mlx_parallm.train.losses import k3
from mlx_parallm.train.pacing import Pacer, Stage
from mlx_parallm.train.packing import MicroBatch, SampleBatch, pack, split_samples
from mlx_parallm.train.policy import Policy, PolicyState

_log = logging.getLogger(__name__)

RATE_ENDS = (
    "the %s learning rate is 0 after %d updates, and later ones change nothing: raise "
    "rl_training.optimizer.decay_updates, or set rl_training.optimizer.schedule to constant"
)
"""What the log says once when an update has this learning rate."""

T = TypeVar("T")

NO_GRADIENT = "no_gradient"
"""Why a step was skipped that had nothing to learn from. The other reasons are faults."""

_MOVES = 7
"""How often one step is moved back at most. What is still too long then is judged by the limits of divergence."""

_MARGIN, _LEAST_SHARE = 0.9, 0.1
"""A step is moved back to a little less than the target, and at most to a tenth at a time: far from the policy, the KL
says little about how the KL falls as the step shrinks."""

Parts = Generator[Accumulation | None, None, T]
"""The parts of a job, each of which fits in one unit. It yields None after a part, or an accumulation whose batches are
to be run in micro-steps, together with those of other policies, before it goes on."""


class JobKind(Enum):
    """What a job does. OTHER: what belongs to no policy, see `GRPOTrainer.run`."""

    ACCUMULATE = auto()
    STEP = auto()
    UPDATE = auto()
    LOGPROBS = auto()
    OTHER = auto()


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """What a caller has asked for.

    Attributes:
        policy: None is the base model, or, of an OTHER job, that it has no policy.
        needs: jobs without which it fails.
        parts: set by the trainer.
        accumulation: what it has yielded last.
        charged_seconds: `device_seconds` without the part that runs now, which began at `resumed_at`; None: none does.
        future: completed by the trainer with what `parts` returns, or with StepFailedError.
    """

    kind: JobKind
    policy: Policy | None
    needs: Sequence[Job[Any]] = ()
    parts: Parts[T] = field(init=False)
    accumulation: Accumulation | None = None
    future: Future[T] = field(default_factory=Future)
    asked_at: float = field(default_factory=time.monotonic)
    charged_seconds: float = 0.0
    resumed_at: float | None = None

    @property
    def device_seconds(self) -> float:
        """Its share of the time of the units that worked on it, up to now."""
        return self.charged_seconds + (0.0 if self.resumed_at is None else time.monotonic() - self.resumed_at)


class Jobs:
    """The generators of jobs.

    Attributes:
        accumulated: the gradients of each policy since its last step.

    Args:
        measure_base: report the KL divergence from the base model even if the loss does not read it. This costs one
            more forward pass over a random quarter of the sample batches.
    """

    def __init__(self, forwards: TrainingForwards, pacer: Pacer, config: ResolvedTraining, measure_base: bool) -> None:
        self.accumulated: dict[Policy, Accumulated] = {}
        self._forwards = forwards
        self._pacer = pacer
        self._config = config
        self._measure_base = measure_base
        self._warned_of_rate = False

    # -- gradients -------------------------------------------------------------------------------

    def accumulate(self, job: Job[Contribution], work: Accumulation) -> Parts[Contribution]:
        """Adds the gradients of some samples to those that the policy has accumulated since its last step."""
        yield from self._gradients(work)
        work.device_seconds = job.device_seconds
        contribution = work.contribution()
        self.accumulated.setdefault(work.policy, Accumulated()).add(work)
        return contribution

    def _gradients(self, work: Accumulation) -> Parts[None]:
        """Computes the gradients of an accumulation, and what its loss and its metrics need beside them."""
        if work.loss.kind is LossKind.KTO:
            work.kl_estimate = yield from self._mismatched_kl(work)
        yield work
        if self._measure_base and not work.returns_logprobs and not work.loss.reads_reference:
            work.base_kl = yield from self._kl(work, None)

    def micro_step(self, batches: Mapping[Accumulation, SampleBatch]) -> Generator[None, None, None]:
        """Adds the gradients of one sample batch of each accumulation to those before them."""
        return self._pacer.run(self.stages(batches), sum(batch.size for batch in batches.values()))

    def stages(self, batches: Mapping[Accumulation, SampleBatch]) -> Iterator[Stage]:
        """The stages of `micro_step`."""
        micro_step = self._forwards.gradients(
            [
                MicroStepInput(
                    work.packed(batch), work.policy.state, work.loss, work.totals, work.gradients, work.kl_estimate
                )
                for work, batch in batches.items()
            ]
        )
        for (work, batch), result in zip(batches.items(), micro_step.results, strict=True):
            work.add(batch, result)
        yield from micro_step.stages

    # -- steps -----------------------------------------------------------------------------------

    def step(self, job: Job[UpdateOutcome], optimizer: OptimizerConfig) -> Parts[UpdateOutcome]:
        """Makes a step of what the policy has accumulated, which is forgotten whatever comes of it."""
        assert job.policy is not None
        return (yield from self._step(job, self.accumulated.pop(job.policy), optimizer))

    def _step(
        self,
        job: Job[UpdateOutcome],
        accumulated: Accumulated,
        optimizer: OptimizerConfig,
        scale: float = 1.0,
        needs_gradient: bool = False,
        measured: Sequence[Accumulation] = (),
        origin: PolicyState | None = None,
    ) -> Parts[UpdateOutcome]:
        """Makes a step, unless it has to be skipped.

        Args:
            scale: multiplies the gradients before they are clipped, and the change of the policy. Below 1 if only a
                part of the samples has a signal: the others count with a gradient of zero.
            needs_gradient: skip the step if all gradients are zero. What AdamW remembers of earlier ones would still
                move the policy.
            measured: accumulations over a sample of which its KL is measured; empty: it is not, nor is it moved back.
            origin: the state from which the step is measured, and towards which it is moved back.
        """
        policy, after = cast(Policy, job.policy), None
        norm = accumulated.clip(optimizer.max_grad_norm / scale)
        figures = {**metrics(accumulated.parts), "grad_norm": norm}
        skipped = _why_skipped(figures["loss"], norm, needs_gradient)
        if not skipped:
            after = policy.stepped(accumulated.take(), optimizer, scale)
            yield from self._pacer.run(after.stages(), 0)
            skipped = "" if _all_finite(after.params) else "weights_not_finite"
        share = 1.0
        if after is not None and not skipped:
            if measured:
                after, share, figures["kl_step"] = yield from self._shortened(
                    after, origin or policy.state, measured, optimizer.max_kl_step
                )
            figures["learning_rate"] = after.learning_rate
            if not after.learning_rate and optimizer.last_step is not None and not self._warned_of_rate:
                self._warned_of_rate = True
                _log.warning(RATE_ENDS, optimizer.schedule.value, optimizer.last_step)
            policy.restore(after)
        else:
            _log.warning("an update was skipped: %s", skipped)
        figures |= {"step_scale": scale * share, "seconds": time.monotonic() - job.asked_at}
        figures["device_seconds"] += job.device_seconds
        return UpdateOutcome(policy.state.step, skipped, figures)

    def _shortened(
        self, after: PolicyState, origin: PolicyState, measured: Sequence[Accumulation], limit: float | None
    ) -> Parts[tuple[PolicyState, float, float]]:
        """Measures the KL of a step, in nats per token, and moves the step back towards `origin` until that is within
        the limit.

        The KL grows with the square of the way for small steps, so one more measurement is usually enough. All of this
        depends on the samples and the policy alone, so a replayed update is the same to the bit.

        Returns:
            The state after the step, the share of the way that it went, and its KL.
        """
        share, kl = 1.0, (yield from self._mean_kl(measured, after))
        for _ in range(_MOVES):
            if limit is None or kl <= limit:  # false for NaN, which is too far
                break
            part = _MARGIN * math.sqrt(limit / kl) if math.isfinite(kl) else _LEAST_SHARE
            part = max(part, _LEAST_SHARE)
            after, share = measured[0].policy.moved_back(after, origin, part), share * part
            kl = yield from self._mean_kl(measured, after)
        return after, share, kl

    def update(
        self, job: Job[UpdateOutcome], batch: UpdateBatch, works: Sequence[Accumulation], settings: UpdateSettings
    ) -> Parts[UpdateOutcome]:
        """Makes a step from each minibatch, one after the other: all of them, or none. `works`: the minibatches.

        The logprobs of the policy before the first step are what every minibatch is compared with. The last step
        measures the KL of the whole update, and is moved back for it.
        """
        policy, several = works[0].policy, len(works) > 1
        optimizer = settings.optimizer.at(batch.learning_rate)
        limited = optimizer.max_kl_step is not None or self._config.divergence.kl_step.limit is not None
        measures_kl = limited and works[0].loss.kind is LossKind.POLICY_GRADIENT
        start, outcomes = policy.state, list[UpdateOutcome]()
        try:
            tokens = settings.micro_batch_tokens
            before = (yield from self._logprobs(policy, batch.samples, tokens)) if several else None
            for work in works:
                work.before = before
                yield from self._gradients(work)
                accumulated = Accumulated()
                accumulated.add(work)
                measured = works if measures_kl and work is works[-1] else ()
                outcomes.append(
                    (yield from self._step(job, accumulated, optimizer, batch.step_scale, not several, measured, start))
                )
            skipped = next((outcome.skipped for outcome in outcomes if outcome.skipped), "")
            figures = {**batch.metrics, **_together([outcome.metrics for outcome in outcomes])}
        except BaseException:  # also if the generator is closed
            policy.restore(start)
            raise
        if skipped:
            policy.restore(start)
        return UpdateOutcome(policy.state.step, skipped, figures)

    # -- logprobs --------------------------------------------------------------------------------

    def logprobs(self, policy: Policy | None, samples: Sequence[Datum]) -> Parts[list[tuple[float, ...]]]:
        """Computes the logprobs of each sample's trained tokens."""
        found = yield from self._logprobs(policy, samples, self._config.micro_batch_tokens)
        return [found[id(sample)] for sample in samples]

    def _logprobs(self, policy: Policy | None, samples: Sequence[Datum], max_tokens: int) -> Parts[SampleLogprobs]:
        found: dict[int, tuple[float, ...]] = {}
        for batch in split_samples(samples, max_tokens):
            state = None if policy is None else policy.state
            found |= of_samples(batch, (yield from self._forward(pack(batch), state)))
        return found

    def _mean_kl(self, works: Sequence[Accumulation], other: PolicyState) -> Parts[float]:
        """The mean of `_kl` over the tokens of several accumulations."""
        total = 0.0
        for work in works:
            total += work.trained_tokens * (yield from self._kl(work, other))
        return total / sum(work.trained_tokens for work in works)

    def _kl(self, work: Accumulation, other: PolicyState | None) -> Parts[float]:
        """Estimates the KL divergence (k3 estimator) of the policy before the update from another state, or from the
        base model (None), in nats per token, over a sample of an accumulation.

        The logprobs before the update are the trainer's own, so it does not matter which version sampled the tokens.
        """
        means = []
        for batch in work.sampled_batches():
            logprobs = yield from self._forward(pack(batch), other)
            kl = k3(work.old_logprobs(batch), logprobs).sum()
            means.append(cast(float, kl.item()) / batch.trained_tokens)
        return sum(means) / len(means)

    def _mismatched_kl(self, work: Accumulation) -> Parts[float]:
        """Estimates the KL divergence of whole answers from the base model, from answers to other prompts."""
        total = 0.0
        for batch in work.mismatched:
            packed = pack(batch)
            ours = yield from self._forward(packed, work.policy.state)
            theirs = yield from self._forward(packed, None)
            total += cast(float, (packed.padded(ours - theirs) * packed.weights).sum().item())
        return max(0.0, total / sum(len(batch.samples) for batch in work.mismatched))

    def _forward(self, packed: MicroBatch, state: PolicyState | None) -> Parts[mx.array]:
        """The logprobs of the trained tokens of a batch under a policy, or the base model (None), fp32 [N]."""
        tokens = packed.tokens.size
        forward = self._forwards.scores(
            [packed], None if state is None else [LoraSpan(tokens, state.params, state.scale)]
        )
        logprobs = forward.scores[0][0]
        yield from self._pacer.run(forward.stages(logprobs), tokens)
        return logprobs


def _why_skipped(loss: float, norm: float, needs_gradient: bool) -> str:
    """Why a step is not made, or ""."""
    if not math.isfinite(loss):
        return "loss_not_finite"
    if not math.isfinite(norm):
        return "gradient_not_finite"
    return NO_GRADIENT if needs_gradient and norm == 0 else ""


def _all_finite(params: Params) -> bool:
    return bool(mx.all(mx.stack([mx.isfinite(leaf).all() for _, leaf in tree_flatten(params)])).item())


_SUMS, _LARGEST = ("tokens",), ("ratio_max", "seconds", "device_seconds")
_OF_LAST = ("learning_rate", "kl_step", "step_scale")
"""Figures of the last step: it is that which moves the whole update back."""


def _together(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of all steps: means over tokens, sums and largest values; and those of the last step. The seconds of
    each are those since the update was asked for."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _figure(name, [step for step in steps if name in step]) for name in names}


def _figure(name: str, steps: Sequence[Mapping[str, float]]) -> float:
    values = [step[name] for step in steps]
    if name in _SUMS:
        return sum(values)
    if name in _LARGEST:
        return max(values)
    if name in _OF_LAST:
        return values[-1]
    return sum(step[name] * step["tokens"] for step in steps) / sum(step["tokens"] for step in steps)
