"""Evaluation: the mean reward of adapter versions on held-out tasks, with its confidence interval, and when versions of
an adapter are evaluated.

held-out tasks ─▶ HeldOut ─┬▶ HeldOutAnswers     a task is one request, and its answers are scored
                           └▶ HeldOutEpisodes    the environment's own rollout does a task
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.rewards import comparison_key
from mlx_parallm.rl.rollouts.answers import RolloutSettings, all_ended, trajectories_of
from mlx_parallm.rl.rollouts.episodes import EpisodeClient
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.status import EvaluationResult

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
        self.key = comparison_key(held_out.identity)
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


# ---- when versions are evaluated -----------------------------------------------------------------

_STEP, _VERSION, _AT = "eval_step", "eval_version", "eval_at"
_BEST, _KEY = "eval_best", "eval_key"


class EvaluationHistory:
    """The evaluations of one adapter: when the next one is due, the last one, and the best mean so far.

    Args:
        evaluator: None: there are no evaluations.
        every: updates between two evaluations.
        emit: emits events, with the adapter's name.

    Attributes:
        last: the last evaluation of a version that was live then.
        failures: evaluations that failed.
    """

    def __init__(
        self, evaluator: Evaluator | None = None, every: int = 1, emit: Emit = lambda kind, **data: None
    ) -> None:
        self.last: EvaluationResult | None = None
        self.failures = 0
        self._evaluator = evaluator
        self._every = every
        self._emit = emit
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

    async def evaluate(
        self, version: AdapterRef, step: int, lease: AbstractContextManager[object]
    ) -> EvaluationResult | None:
        """Evaluates a version, live or staged, within its `lease`; see `Evaluator.evaluate`. None: it failed, which is
        logged, emitted and counted."""
        assert self._evaluator is not None
        _log.info("evaluating %s on the held-out tasks", version)
        try:
            with lease:
                result = await self._evaluator.evaluate(version, step)
        except Exception as error:  # noqa: BLE001 - whatever failed, training goes on
            _log.exception("the evaluation of %s failed", version)
            self.failures += 1
            reason = str(error) or type(error).__name__
            self._emit("evaluation_failed", version=str(version), step=step, reason=reason)
            return None
        self._emit("evaluation", version=str(version), step=step, metrics=dict(result.metrics))
        return result

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

    def restore_best(self, metrics: Mapping[str, float]) -> None:
        """Makes the best mean at least the one in the metrics of the best version's checkpoint. A rollback keeps that
        version the best one, so the checkpoint that training starts from may be older than it."""
        if self._evaluator is not None and metrics.get(_KEY) == self._evaluator.key and _BEST in metrics:
            self._best = max(metrics[_BEST], metrics[_BEST] if self._best is None else self._best)

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


# ---- held-out tasks, and how a version does them -------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldOutTask:
    """The token ids of a held-out prompt, and how its answers are scored."""

    prompt_ids: tuple[int, ...]
    collection: CollectionSpec


class HeldOutAnswers:
    """Implements `HeldOut`.

    Args:
        reward: what rewards depend on besides the tasks, as text.
    """

    def __init__(
        self,
        engine: EngineClient,
        scorers: ScoringService,
        tasks: Sequence[HeldOutTask],
        settings: AnswerSettings,
        reward: str = "",
    ) -> None:
        self.settings, self.size = settings, len(tasks)
        self.identity = repr((tuple(tasks), settings, reward))
        self._engine, self._scorers, self._tasks = engine, scorers, tasks
        self._numbers = itertools.count()

    async def do(self, version: AdapterRef, number: int) -> TaskResult:
        """Asks for all answers with one request."""
        settings, task = self.settings, self._tasks[number]
        request = GenerationRequest(
            request_id=f"eval-{next(self._numbers)}",
            prompts=(task.prompt_ids,),
            # Sample j of a task has the seed + j.
            sampling=SamplingParams(temperature=settings.temperature, seed=number * settings.samples),
            stopping=StopParams(settings.max_tokens),
            n=settings.samples,
            adapter=version,
            work_class=WorkClass.TRAINING,
            collection=task.collection,
        )
        (group,) = await trajectories_of(request, self._engine.generate)
        return TaskResult(await self._scorers.score(group))


Play = Callable[[EpisodeClient, Task], Awaitable[float | None]]


class HeldOutEpisodes:
    """Implements `HeldOut`. Event loop's thread only.

    Args:
        play: does a task once with a client; see `rollouts.episodes.play`.
        timeout_s: the longest time that an episode may take besides the model's answers.
        reward: what rewards depend on besides the tasks, as text.
    """

    def __init__(
        self,
        play: Play,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        scorers: ScoringService,
        tasks: Sequence[Task],
        settings: AnswerSettings,
        timeout_s: float,
        reward: str = "",
    ) -> None:
        self.settings, self.size = settings, len(tasks)
        self.identity = repr(([(task.messages, task.collection) for task in tasks], settings, reward))
        self._play = play
        self._engine, self._tokenizer = engine, tokenizer
        self._scorers, self._tasks = scorers, tasks
        self._timeout_s = timeout_s
        self._numbers = itertools.count()

    async def do(self, version: AdapterRef, number: int) -> TaskResult:
        """Plays all episodes of the task at the same time. One that fails does not stop the others."""
        task, samples = self._tasks[number], self.settings.samples
        settings = RolloutSettings(
            samples,
            self.settings.max_tokens,
            self.settings.temperature,
            run=f"eval-{next(self._numbers)}",
            timeout_s=self._timeout_s,
        )
        clients = [
            EpisodeClient(self._engine.generate, self._tokenizer, settings, version, task, number, episode)
            for episode in range(samples)
        ]
        rewards = await all_ended(self._reward(client, task) for client in clients)
        fault = next((reward for reward in rewards if isinstance(reward, Exception)), None)
        return TaskResult(tuple(reward for reward in rewards if isinstance(reward, float)), fault)

    async def _reward(self, client: EpisodeClient, task: Task) -> float:
        """The reward of one episode: the environment's, or that of the scoring function for its last answer."""
        reward = await self._play(client, task)
        if reward is None:
            (reward,) = await self._scorers.score(client.turns[-1:])
        return reward
