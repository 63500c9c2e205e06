"""Evaluation: the mean reward of adapter versions on held-out tasks, with its confidence interval."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterRef,
    CollectionSpec,
    EngineClient,
    EvaluationResult,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.collect.recorder import TrajectoryRecorder
from mlx_parallm.rl.rollouts import events_of
from mlx_parallm.rl.scoring.service import ScoringService

_log = logging.getLogger(__name__)


class EvaluationError(Exception):
    """A version could not be evaluated, because too few tasks were answered and scored."""


# ---- the interval --------------------------------------------------------------------------------

_Z = 1.959963985
"""Quantile of the normal distribution for 95 % on two sides."""


def interval(means: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of `means`, each of which is the mean reward of one task.

    If all of them are 0 or 1, this is Wilson's score interval (1927), which also holds for few tasks and near 0 and 1.
    Otherwise it is the mean ± 1.96 standard errors. Tasks are independent and the samples of a task are not, so the
    standard error is that of the tasks' means (E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640).
    """
    count, mean = len(means), fmean(means)
    if not set(means) <= {0.0, 1.0}:
        margin = _Z * stdev(means) / math.sqrt(count)
        return mean - margin, mean + margin
    centre = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    margin = _Z / (1 + _Z**2 / count) * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
    return min(mean, centre - margin), max(mean, centre + margin)


# ---- asking a version ----------------------------------------------------------------------------


_ANSWERS_AT_ONCE = 32
"""Answers that the engine is asked for at a time, so that none of them waits in its queue for long."""


@dataclass(frozen=True, slots=True)
class HeldOutTask:
    """The token ids of a held-out prompt, and how its answers are scored."""

    prompt_ids: tuple[int, ...]
    collection: CollectionSpec


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How held-out tasks are answered: `samples` answers to each, of at most `max_tokens` tokens, at `temperature`."""

    samples: int
    temperature: float
    max_tokens: int


class Evaluator:
    """Asks adapter versions the same tasks with the same seeds. It shares the rows of rollouts, and nothing of it is
    trained on.

    Args:
        reward: what rewards depend on besides the tasks, as text.

    Attributes:
        key: equal for equal tasks, settings and rewards, whose results can be compared. A whole number.
    """

    def __init__(
        self,
        engine: EngineClient,
        scorers: ScoringService,
        tasks: Sequence[HeldOutTask],
        settings: AnswerSettings,
        reward: str = "",
    ) -> None:
        self.key = float(int(hashlib.sha256(repr((tuple(tasks), settings, reward)).encode()).hexdigest()[:12], 16))
        self._engine = engine
        self._scorers = scorers
        self._tasks = tasks
        self._settings = settings
        self._numbers = itertools.count()

    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        """The mean reward of this version, live or not. Tasks that cannot be answered or scored are left out.

        Raises:
            EvaluationError: fewer than two tasks are left.
            EngineDeadError: the device thread has stopped.
        """
        places = asyncio.Semaphore(max(1, _ANSWERS_AT_ONCE // self._settings.samples))

        async def rewards_of(number: int, task: HeldOutTask) -> tuple[float, ...]:
            async with places:
                return await self._rewards(version, number, task)

        asked = (rewards_of(number, task) for number, task in enumerate(self._tasks))
        results = await asyncio.gather(*asked, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if isinstance(failure, EngineDeadError) or not isinstance(failure, Exception):
                raise failure
        rewards = [result for result in results if not isinstance(result, BaseException)]
        if failures:
            first = f"{type(failures[0]).__name__}: {failures[0]}"
            _log.warning("%d of %d held-out tasks failed, the first with %s", len(failures), len(results), first)
            if len(rewards) < 2:
                raise EvaluationError(
                    f"{len(failures)} of {len(results)} held-out tasks failed, the first with {first}"
                )
        means = [fmean(of_task) for of_task in rewards]
        count = sum(map(len, rewards))
        return EvaluationResult(version, step, fmean(means), *interval(means), count, len(failures), time.time())

    async def _rewards(self, version: AdapterRef, number: int, task: HeldOutTask) -> tuple[float, ...]:
        settings = self._settings
        request = GenerationRequest(
            request_id=f"eval-{next(self._numbers)}",
            prompts=(task.prompt_ids,),
            # Sample j of a task is drawn with seed + j.
            sampling=SamplingParams(temperature=settings.temperature, seed=number * settings.samples),
            stopping=StopParams(settings.max_tokens),
            n=settings.samples,
            adapter=version,
            work_class=WorkClass.TRAINING,
            collection=task.collection,
        )
        recorder = TrajectoryRecorder(request)
        async for event in events_of(self._engine.generate(request)):
            if isinstance(event, SequenceOutput):
                recorder.add(event)
        (group,) = recorder.groups()
        return await self._scorers.score(group)


# ---- the evaluations of an adapter ---------------------------------------------------------------

_STEP, _VERSION, _AT = "eval_step", "eval_version", "eval_at"
_BEST, _KEY = "eval_best", "eval_key"


class EvaluationHistory:
    """The evaluations of one adapter: when the next one is due, the last one, and the best mean so far.

    Args:
        evaluator: None: there are no evaluations.
        every: updates between two evaluations.

    Attributes:
        last: the last evaluation of a version that was live then.
        failures: evaluations that failed.
    """

    def __init__(self, evaluator: Evaluator | None = None, every: int = 1) -> None:
        self.last: EvaluationResult | None = None
        self.failures = 0
        self._evaluator = evaluator
        self._every = every
        self._counted_from: int | None = None  # the step after which `every` updates are counted
        self._best: float | None = None

    @property
    def enabled(self) -> bool:
        return self._evaluator is not None

    def due(self, step: int) -> bool:
        """Whether a version of this many optimizer steps is to be evaluated: the first one, one that is `every` updates
        after the last evaluation, or one that a rollback has put before it."""
        since = self._counted_from
        return self.enabled and (since is None or not 0 <= step - since < self._every)

    def lacks(self, version: AdapterRef) -> bool:
        """Whether the last evaluation was of another version, or there was none."""
        return self.enabled and (self.last is None or self.last.adapter != version)

    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        """Evaluates a version; see `Evaluator.evaluate`. A failure is counted, and raised."""
        assert self._evaluator is not None
        try:
            return await self._evaluator.evaluate(version, step)
        except Exception:  # whatever failed, it is counted and raised again
            self.failures += 1
            raise

    def add(self, result: EvaluationResult) -> bool:
        """Stores the evaluation of the live version. Returns whether it is the best one so far."""
        self.last, self._counted_from = result, result.step
        if self._best is not None and result.mean <= self._best:
            return False
        self._best = result.mean
        return True

    def postpone(self, step: int) -> None:
        """Call this after an evaluation at this step has failed. The next one is due `every` updates later."""
        self._counted_from = step

    def forget_best(self) -> None:
        """Forgets the best mean, so that the next evaluation is the best one."""
        self._best = None

    def to_metrics(self) -> dict[str, float]:
        """What `restore` needs after a restart, to be saved in a checkpoint's metrics."""
        last = self.last
        if last is None or self._evaluator is None:
            return {}
        place = {
            _STEP: float(last.step),
            _VERSION: float(last.adapter.version),
            _AT: last.at,
            _KEY: self._evaluator.key,
        }
        return {**last.metrics, **place} | ({} if self._best is None else {_BEST: self._best})

    def restore(self, metrics: Mapping[str, float], adapter: str) -> None:
        """Continues from what `to_metrics` returned for this adapter, unless the tasks, the settings or the
        reward of evaluations have changed since then."""
        if self._evaluator is None or metrics.get(_KEY) != self._evaluator.key:
            return
        names = ("eval_mean", "eval_low", "eval_high", "eval_answers", "eval_failed", _STEP, _VERSION, _AT)
        if not metrics.keys() >= set(names):
            return
        mean, low, high, answers, failed, step, version, at = (metrics[name] for name in names)
        ref = AdapterRef(adapter, int(version)) if version else BASE_ADAPTER
        self.last = EvaluationResult(ref, int(step), mean, low, high, int(answers), int(failed), at)
        self._counted_from = int(step)
        self._best = metrics.get(_BEST)
