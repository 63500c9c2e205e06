"""Rollouts that no client asks for: an environment's tasks, answered by the adapter in training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeGuard, cast

from mlx_parallm.core import (
    AdapterClient,
    EngineClient,
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextTokenizer,
    WorkClass,
)
from mlx_parallm.errors import EngineDeadError, EngineError, TrainingFailedError
from mlx_parallm.rl.environments import Task


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`group_size` samples a task, of at most `max_tokens`, at `temperature`. `seed`: of the samples.

    `run`: of the trajectories' ids. `taken`: tasks that were taken before: ids and seeds go on after them.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    run: str = "0"
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one draw gave. `failures`: for people, one line for each task that could not be answered."""

    tokens: int
    failures: tuple[str, ...]


class Rollouts:
    """Draws groups of trajectories. Event loop's thread only.

    Args:
        engine: one that collects.
        tasks: endless, and begins with the task after those taken before.
        tell: called with the number of trajectories that have just ended.

    Attributes:
        taken: tasks so far, those of `settings.taken` among them.
    """

    def __init__(
        self,
        engine: EngineClient,
        adapters: AdapterClient,
        tokenizer: TextTokenizer,
        tasks: Iterator[Task],
        settings: RolloutSettings,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.taken = settings.taken
        self._engine = engine
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._settings = settings
        self._tell = tell

    async def draw(self, groups: int, selector: str) -> Drawn:
        """Answers the next `groups` tasks with what `selector` means now. A task that fails costs itself only.

        Raises:
            EngineDeadError: the device thread has stopped.
            TrainingFailedError: there is no next task.
        """
        tasks = await asyncio.to_thread(self._take, groups)
        first, self.taken = self.taken, self.taken + groups
        answers = [self._answer(number, task, selector) for number, task in enumerate(tasks, first)]
        ends = await asyncio.gather(*answers, return_exceptions=True)
        for end in ends:
            if isinstance(end, EngineDeadError) or not isinstance(end, int | Exception):
                raise end
        failures = tuple(f"task {number}: {_said(end)}" for number, end in enumerate(ends, first) if not _is_count(end))
        return Drawn(sum(filter(_is_count, ends)), failures)

    def _take(self, groups: int) -> list[Task | Exception]:
        """The next tasks, or what the environment raised in place of one."""
        taken: list[Task | Exception] = []
        while len(taken) < groups:
            try:
                taken.append(next(self._tasks))
            except StopIteration:
                last = taken[-1] if taken else None
                why = f" after it raised: {_said(last)}" if isinstance(last, Exception) else ""
                raise TrainingFailedError(f"the environment has no more tasks{why}") from None
            except Exception as error:  # noqa: BLE001 - code of somebody else: it costs this task
                taken.append(error)
        return taken

    async def _answer(self, number: int, task: Task | Exception, selector: str) -> int:
        """How many tokens were drawn. Raises what the task runs into."""
        if isinstance(task, Exception):
            raise task
        settings = self._settings
        with self._adapters.lease(selector) as adapter:
            request = GenerationRequest(
                request_id=f"rollout-{settings.run}-{number}",
                prompts=(tuple(self._tokenizer.apply_chat_template(task.messages)),),
                sampling=SamplingParams(temperature=settings.temperature, seed=_seed(settings, number)),
                stopping=StopParams(settings.max_tokens),
                n=settings.group_size,
                adapter=adapter,
                work_class=WorkClass.TRAINING,
                collection=task.collection,
            )
            end = await finished(self._engine, request)
        self._tell(settings.group_size)
        return end.completion_tokens


def _is_count(end: int | BaseException) -> TypeGuard[int]:
    return isinstance(end, int)


def _said(error: object) -> str:
    return str(error) or type(error).__name__


def _seed(settings: RolloutSettings, number: int) -> int:
    """Sample j of a group draws with seed + j."""
    return settings.seed * 2**32 + number * settings.group_size


async def finished(engine: EngineClient, request: GenerationRequest) -> RequestFinished:
    """Reads a request's events to the end. Raises the error of a RequestFailed."""
    # `core` promises aclose() on this iterator.
    events = cast(AsyncGenerator[Event, None], engine.generate(request))
    async with aclosing(events):
        async for event in events:
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, RequestFinished):
                return event
    raise EngineError("the engine ended a request without a terminal event")
