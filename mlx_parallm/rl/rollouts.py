"""Rollouts without clients: tasks of an environment, answered by the adapter in training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from mlx_parallm.core import (
    AdapterClient,
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
from mlx_parallm.rl.environments import Task, with_system_prompt

Generate = Callable[[GenerationRequest], AsyncIterator[Event]]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How rollouts are drawn: `group_size` samples for each task, of at most `max_tokens` tokens, at `temperature`.

    `system_prompt`: the system message of tasks that have none of their own; None: they get none.
    `seed`: all samples get their seeds from it. `run`: part of the trajectories' ids. `taken`: tasks that were taken in
    an earlier process; ids and seeds continue after them.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    system_prompt: str | None = None
    seed: int = 0
    run: str = "0"
    taken: int = 0


@dataclass(frozen=True, slots=True)
class DrawResult:
    """What was drawn. `tokens`: completion tokens. `failures`: for people, one line for each task that failed."""

    tokens: int
    failures: tuple[str, ...]


class Rollouts:
    """Draws groups of trajectories. Event loop's thread only.

    Args:
        generate: answers a request, and collects its trajectories.
        tasks: endless; starts after the tasks that were taken before.
        on_drawn: called with the number of trajectories that have just finished.

    Attributes:
        taken: tasks taken so far, `settings.taken` included.
    """

    def __init__(
        self,
        generate: Generate,
        adapters: AdapterClient,
        tokenizer: TextTokenizer,
        tasks: Iterator[Task],
        settings: RolloutSettings,
        on_drawn: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.taken = settings.taken
        self._generate = generate
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._settings = settings
        self._on_drawn = on_drawn

    async def draw(self, groups: int, selector: str) -> DrawResult:
        """Answers the next `groups` tasks with the current version of `selector`. A failing task does not stop others.

        Raises:
            EngineDeadError: the device thread has stopped.
            TrainingFailedError: there is no next task.
        """
        tasks = await asyncio.to_thread(self._take, groups)
        first, self.taken = self.taken, self.taken + groups
        answers = [self._answer(number, task, selector) for number, task in enumerate(tasks, first)]
        results = await asyncio.gather(*answers, return_exceptions=True)
        for result in results:
            if isinstance(result, EngineDeadError) or not isinstance(result, int | Exception):
                raise result
        failures = [f"task {number}: {_text(r)}" for number, r in enumerate(results, first) if not _is_count(r)]
        return DrawResult(sum(filter(_is_count, results)), tuple(failures))

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

    async def _answer(self, number: int, task: Task | Exception, selector: str) -> int:
        """Returns the number of tokens drawn. Raises what the task fails with."""
        if isinstance(task, Exception):
            raise task
        settings = self._settings
        messages = with_system_prompt(task, settings.system_prompt)
        with self._adapters.lease(selector) as adapter:
            request = GenerationRequest(
                request_id=f"rollout-{settings.run}-{number}",
                prompts=(tuple(self._tokenizer.apply_chat_template(messages)),),
                # Sample j of a group is drawn with seed + j.
                sampling=SamplingParams(
                    temperature=settings.temperature, seed=settings.seed * 2**32 + number * settings.group_size
                ),
                stopping=StopParams(settings.max_tokens),
                n=settings.group_size,
                adapter=adapter,
                work_class=WorkClass.TRAINING,
                collection=replace(task.collection, messages=messages),
            )
            tokens = 0
            async for event in events_of(self._generate(request)):
                if isinstance(event, RequestFinished):
                    tokens = event.completion_tokens
        self._on_drawn(settings.group_size)
        return tokens


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


def _is_count(result: int | BaseException) -> TypeGuard[int]:
    return isinstance(result, int)


def _text(error: object) -> str:
    return str(error) or type(error).__name__
