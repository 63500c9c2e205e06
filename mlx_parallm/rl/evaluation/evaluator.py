"""Evaluation: the mean reward of adapter versions on held-out tasks, with its confidence interval.

held-out tasks ─▶ HeldOut ─┬▶ HeldOutAnswers     a task is one request, and its answers are scored
                           └▶ HeldOutEpisodes    the environment's own rollout does a task
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol

from mlx_parallm.core import AdapterRef, EvaluationResult
from mlx_parallm.errors import EngineDeadError

_log = logging.getLogger(__name__)


class EvaluationError(Exception):
    """A version could not be evaluated, because too few tasks were done and rewarded."""


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

_AT_ONCE = 32
"""Answers or episodes under way at a time, so that none of them waits in the engine's queue for long."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How held-out tasks are done: each `samples` times, with answers of at most `max_tokens` tokens, at
    `temperature`."""

    samples: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one task gave. `rewards`: of the answers or episodes that succeeded. `fault`: why another one did not."""

    rewards: tuple[float, ...]
    fault: Exception | None = None


class HeldOut(Protocol):
    """Held-out tasks, and how a version does them.

    Attributes:
        settings: how they are done.
        size: the number of tasks.
        identity: a text that is equal for tasks, settings and rewards whose results can be compared.
    """

    @property
    def settings(self) -> AnswerSettings: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    async def do(self, version: AdapterRef, number: int) -> TaskResult:
        """Does the task of this number, with the same seeds whatever the version. Nothing of it is trained on.

        Raises:
            EngineDeadError: the device thread has stopped.
            Exception: the task could not be done or scored.
        """


class Evaluator:
    """Has adapter versions do the same tasks with the same seeds. It shares the rows of rollouts.

    Attributes:
        key: equal for evaluations that can be compared. A whole number.
    """

    def __init__(self, held_out: HeldOut) -> None:
        self.key = float(int(hashlib.sha256(held_out.identity.encode()).hexdigest()[:12], 16))
        self._held_out = held_out

    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        """The mean reward of this version, live or not. What cannot be done or scored is left out, and counted.

        Raises:
            EvaluationError: fewer than two tasks have a reward.
            EngineDeadError: the device thread has stopped.
        """
        places = asyncio.Semaphore(max(1, _AT_ONCE // self._held_out.settings.samples))

        async def result_of(number: int) -> TaskResult:
            async with places:
                return await self._held_out.do(version, number)

        asked = (result_of(number) for number in range(self._held_out.size))
        results = [_checked(result) for result in await asyncio.gather(*asked, return_exceptions=True)]
        means = [fmean(result.rewards) for result in results if result.rewards]
        faults = [result.fault for result in results if result.fault is not None]
        if faults:
            failed = f"{len(faults)} of {len(results)} held-out tasks failed"
            first = f"the first with {type(faults[0]).__name__}: {faults[0]}"
            _log.warning("%s, %s", failed, first)
            if len(means) < 2:
                raise EvaluationError(f"{failed}, {first}")
        count = sum(len(result.rewards) for result in results)
        return EvaluationResult(version, step, fmean(means), *interval(means), count, len(faults), time.time())


def _checked(result: TaskResult | BaseException) -> TaskResult:
    """What a task gave. Raises what concerns more than this task."""
    if isinstance(result, TaskResult):
        return result
    if isinstance(result, EngineDeadError) or not isinstance(result, Exception):
        raise result
    return TaskResult((), result)
