"""Rollouts without clients: tasks of an environment, answered by the adapter in training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.tool_text import chat_prompt
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import EngineDeadError, EngineError, TrainingFailedError
from mlx_parallm.rl.environments import Task, with_system_prompt
from mlx_parallm.rl.environments.thread import in_daemon_thread
from mlx_parallm.rl.recording import TrajectoryRecorder

if TYPE_CHECKING:
    from mlx_parallm.adapters.service import AdapterService


from typing import Protocol

from mlx_parallm.core.engine import EngineClient

T = TypeVar("T")

Generate = Callable[[GenerationRequest], AsyncIterator[Event]]

OnSampled = Callable[[int, int], None]
"""Called with the number of a task and how many of its answers or episodes have just ended."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How rollouts are sampled: `group_size` samples for each task, of at most `max_tokens` tokens, at `temperature`.

    `system_prompt`: the system message of tasks that have none of their own; None: they get none.
    `key`: the name of the API key for which they are sampled; empty: the server samples them for tasks of its own.
    `seed`: all samples get their seeds from it. `run`: part of the trajectories' ids. `taken`: tasks that were taken in
    an earlier process; ids and seeds continue after them. `timeout_s`: the longest time that an environment may take
    for its next tasks, and for one episode besides the model's answers.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    system_prompt: str | None = None
    seed: int = 0
    run: str = "0"
    taken: int = 0
    timeout_s: float = 120.0
    key: str = ""


@dataclass(frozen=True, slots=True)
class TakenTasks:
    """Tasks that were taken from the environment. `first`: the number of the first one; the others follow it. Where
    the environment has raised, its exception is in the task's place."""

    first: int
    tasks: Sequence[Task | Exception]

    @property
    def end(self) -> int:
        """The number after the last one."""
        return self.first + len(self.tasks)


class NoTaskYetError(TrainingFailedError):
    """The environment has given no task in time. The next take waits for the same task."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What was sampled. `tokens`: completion tokens. `failures`: for people, one line for each task that failed.
    `faults`: one for each task whose answers will not all be trained on."""

    tokens: int
    failures: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


SampleEpisodes = Callable[[int, Task, AdapterRef], Awaitable[RolloutResult]]
"""Does the task of a number several times with one version; see `Episodes.sample`."""


class Rollouts:
    """Samples groups of trajectories. Event loop's thread only.

    Args:
        generate: answers a request, and collects its trajectories.
        tasks: endless; starts after the tasks that were taken before.
        sample_episodes: does the tasks of an environment with rollouts of its own; None: a task is one request.

    Attributes:
        taken: tasks taken so far, `settings.taken` included.
    """

    def __init__(
        self,
        generate: Generate,
        adapters: AdapterService,
        tokenizer: TextTokenizer,
        tasks: Iterator[Task],
        settings: RolloutSettings,
        on_sampled: OnSampled = lambda _, __: None,
        sample_episodes: SampleEpisodes | None = None,
    ) -> None:
        self.taken = settings.taken
        self._generate, self._adapters, self._tokenizer = generate, adapters, tokenizer
        self._tasks, self._settings, self._on_sampled = tasks, settings, on_sampled
        self._sample = sample_episodes or self._sample_answers
        self._taking = asyncio.Lock()
        self._coming: asyncio.Task[list[Task | Exception]] | None = None  # tasks that nobody has got yet

    async def sample(self, groups: int, selector: str) -> RolloutResult:
        """Takes the next `groups` tasks and answers them. Raises what `take` and `answer` raise."""
        return await self.answer(await self.take(groups), selector)

    async def take(self, groups: int) -> TakenTasks:
        """Takes the next `groups` tasks, or those that an earlier call has not waited for to the end.

        Raises:
            NoTaskYetError: they have not come in time.
            TrainingFailedError: there is no next task.
        """
        async with self._taking:  # a generator gives one task at a time, and they are numbered in order
            tasks = await self._next_tasks(groups)
            first, self.taken = self.taken, self.taken + len(tasks)
        return TakenTasks(first, tasks)

    async def answer(self, taken: TakenTasks, selector: str) -> RolloutResult:
        """Answers tasks with the current version of `selector`. A failing task does not stop others.

        Raises:
            EngineDeadError: the device thread has stopped.
        """
        numbered = enumerate(taken.tasks, taken.first)
        results = await all_ended(self._answer(number, task, selector) for number, task in numbered)
        tokens, failures, faults = 0, list[str](), list[str]()
        for number, result in enumerate(results, taken.first):
            if isinstance(result, Exception):
                failures.append(f"task {number}: {_text(result)}")
            else:
                tokens += result.tokens
                faults += [f"task {number}: {fault}" for fault in result.faults]
        return RolloutResult(tokens, tuple(failures), tuple(faults))

    async def _next_tasks(self, groups: int) -> list[Task | Exception]:
        if self._coming is None:  # a generator cannot be asked again before it has answered
            self._coming = asyncio.create_task(in_daemon_thread(partial(self._take, groups)))
        passes_over = self.taken == self._settings.taken > 0  # the tasks of earlier processes, however long that takes
        await asyncio.wait([self._coming], timeout=None if passes_over else self._settings.timeout_s)
        if not self._coming.done():
            raise NoTaskYetError(f"the environment gave no task within {self._settings.timeout_s:g} s")
        came, self._coming = self._coming, None
        return came.result()

    def _take(self, groups: int) -> list[Task | Exception]:
        """The next tasks; an exception of the environment takes the place of a task."""
        taken: list[Task | Exception] = []
        while len(taken) < groups:
            try:
                taken.append(next(self._tasks))
            except StopIteration:
                last = taken[-1] if taken else None
                why = f" after it raised: {_text(last)}" if isinstance(last, Exception) else ""
                raise TrainingFailedError(f"the environment has no more tasks{why}") from None
            except Exception as error:  # noqa: BLE001 - a user's environment may raise anything: this task fails
                taken.append(error)
        return taken

    async def _answer(self, number: int, task: Task | Exception, selector: str) -> RolloutResult:
        """Raises what the task fails with."""
        if isinstance(task, Exception):
            raise task
        task = replace(task, messages=with_system_prompt(task, self._settings.system_prompt))
        with self._adapters.lease(selector, f"rollout-{self._settings.run}-{number}") as adapter:
            return await self._sample(number, task, adapter)

    async def _sample_answers(self, number: int, task: Task, adapter: AdapterRef) -> RolloutResult:
        """Samples all answers with one request."""
        settings = self._settings
        request = GenerationRequest(
            request_id=f"rollout-{settings.run}-{number}",  # see `task_number`
            prompts=(tuple(chat_prompt(self._tokenizer, task.messages)),),
            # Sample j of a group is sampled with seed + j.
            sampling=SamplingParams(
                temperature=settings.temperature, seed=settings.seed * 2**32 + number * settings.group_size
            ),
            stopping=StopParams(settings.max_tokens),
            n=settings.group_size,
            adapter=adapter,
            work_class=WorkClass.TRAINING,
            collection=replace(task.collection, messages=task.messages),
            key=settings.key,
        )
        tokens = 0
        async for event in events_of(self._generate(request)):
            if isinstance(event, RequestFinished):
                tokens = event.completion_tokens
        self._on_sampled(number, settings.group_size)
        return RolloutResult(tokens)


def group_prefixes(run: str) -> tuple[str, ...]:
    """What the ids of a run's groups begin with: those of answers to one request, and those of episodes."""
    return f"group-rollout-{run}-", f"rollout-{run}-"


def task_number(group_id: str, run: str) -> int:
    """The number of the task that a group of the run has answered."""
    prefix = next(prefix for prefix in group_prefixes(run) if group_id.startswith(prefix))
    return int(group_id.removeprefix(prefix).partition("-")[0])


async def all_ended(calls: Iterable[Awaitable[T]]) -> list[T | Exception]:
    """The results of calls that run at the same time, in order. One that raises does not stop the others: its error is
    in its place.

    Raises:
        EngineDeadError: the device thread has stopped.
    """
    results: list[T | Exception] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, EngineDeadError) or (
            isinstance(result, BaseException) and not isinstance(result, Exception)
        ):
            raise result
        results.append(result)
    return results


async def events_of(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """The events of a request; the last one is RequestFinished.

    Raises:
        Exception: the error of a RequestFailed; EngineError if there is no terminal event.
    """
    async with aclosing(cast(AsyncGenerator[Event, None], events)):  # `core` promises aclose()
        async for event in events:
            if isinstance(event, RequestFailed):
                raise event.error
            yield event
            if isinstance(event, RequestFinished):
                return
    raise EngineError("the engine ended a request without a terminal event")


async def trajectories_of(request: GenerationRequest, generate: Generate) -> list[list[Trajectory]]:
    """The trajectories of a request, a group for each prompt in order. They are not collected.

    Raises:
        Exception: see `events_of`.
    """
    recorder = TrajectoryRecorder(request)
    async for event in events_of(generate(request)):
        if isinstance(event, SequenceOutput):
            recorder.add(event)
    return recorder.groups()


def _text(error: object) -> str:
    return str(error) or type(error).__name__


# ---- where the samples come from -----------------------------------------------------------------
#
# Rollouts ─▶ InferenceEngine ─┬▶ SharedEngine    this process, on the weights that are trained
#                              └▶ OutsideEngine   a server of its own, which gets the adapter


class InferenceEngine(Protocol):
    """Samples for a training run. Event loop's thread only."""

    async def open(self, adapter: AdapterRef) -> None:
        """Checks, before the first sample, that the engine can do with this version what training needs.

        Raises:
            ConfigError: it cannot.
        """

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Answers a request with the adapter version that it names; see `core.EngineClient.generate`. Each output has
        `sampling_logprobs`."""

    async def close(self) -> None:
        """Leaves nothing behind in the engine. Safe to call after `open` has failed."""


class SharedEngine:
    """The engine of this process. Serving and training are the same arrays, so there is nothing to copy or to send."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def open(self, adapter: AdapterRef) -> None:
        pass

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        return self._engine.generate(request)

    async def close(self) -> None:
        pass
