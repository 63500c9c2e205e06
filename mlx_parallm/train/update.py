"""Update: several optimizer steps from one batch of samples, all of which are made, or none.

    logprobs of all samples ─▶ minibatch ─▶ step ─▶ minibatch ─▶ step ─▶ … ─▶ outcome

The logprobs of the policy before the first step are what every minibatch is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from mlx_parallm.config import OptimizerConfig, ResolvedTraining
from mlx_parallm.train.accumulation import Accumulation
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome
from mlx_parallm.train.jobs import Work
from mlx_parallm.train.logprobs import Logprobs
from mlx_parallm.train.policy import Policy, PolicyState
from mlx_parallm.train.step import Step

_SUMS, _LARGEST = ("tokens", "device_seconds"), ("ratio_max", "seconds")
_OF_LAST = ("learning_rate", "kl_step", "step_scale")
"""Figures of the last step: it is that which moves the whole update back."""


class Update:
    """Makes one step from each part of a batch, in order.

    Attributes:
        works: what the trainer is to do, in order.
        future: completed with the last step, with the outcome of all of them, or with StepFailedError. If a step failed
            or was skipped, the policy is as it was before the first one.

    Args:
        parts: the batch's samples, in two parts or more.
        measures_kl: whether the KL divergence of the policy before the update from the one after it is measured.
    """

    def __init__(
        self,
        policy: Policy,
        batch: UpdateBatch,
        parts: Sequence[Sequence[Datum]],
        config: ResolvedTraining,
        optimizer: OptimizerConfig,
        measures_kl: bool = False,
    ) -> None:
        self.future: Future[UpdateOutcome] = Future()
        self._policy = policy
        self._metrics = batch.metrics
        self._start: PolicyState | None = None
        self._before = Logprobs(policy, batch.samples, config.micro_batch_tokens)
        self._before.future.add_done_callback(self._keep_state)
        self._steps: list[Step] = []
        self.works: list[Work] = [self._before]
        gradients: list[Accumulation] = []
        for number, part in enumerate(parts, start=1):
            tokens, earlier = config.micro_batch_tokens, self._steps[-1:]
            each = Accumulation(policy, part, batch.loss or config.loss, tokens, before=self._before, needs=earlier)
            gradients.append(each)
            measured = gradients if measures_kl and number == len(parts) else []
            step = Step(
                policy, optimizer, batch.step_scale, needs=[each], measured=measured, origin=lambda: self._start
            )
            self._steps.append(step)
            self.works += each, self._steps[-1]
        self._steps[-1].future.add_done_callback(self._complete)

    def _keep_state(self, _: Future[list[tuple[float, ...]]]) -> None:
        self._start = self._policy.state

    def _complete(self, last: Future[UpdateOutcome]) -> None:
        """Completes the future, after the last step was made or failed."""
        start, self._start = self._start, None
        # a future keeps its callbacks, which would keep the states of the policy
        steps, self._steps, self.works = self._steps, [], []
        if error := last.exception():
            if start is not None:
                self._policy.restore(start)
            self.future.set_exception(error)
            return
        outcomes = [step.future.result() for step in steps]
        skipped = next((outcome.skipped for outcome in outcomes if outcome.skipped), "")
        if skipped:
            self._policy.restore(start)
        metrics = {**self._metrics, **_together([outcome.metrics for outcome in outcomes])}
        metrics["device_seconds"] += self._before.device_seconds
        self.future.set_result(UpdateOutcome(self._policy.state.step, skipped, metrics))


def _together(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of all steps: means over tokens, sums and largest values; and those of the last step."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _figure(name, [part for part in parts if name in part]) for name in names}


def _figure(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in parts]
    if name in _SUMS:
        return sum(values)
    if name in _LARGEST:
        return max(values)
    if name in _OF_LAST:
        return values[-1]
    return sum(part[name] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts)
