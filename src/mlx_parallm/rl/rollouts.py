"""Rollouts that no client asks for: an environment's tasks, answered by the adapter in training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

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
from mlx_parallm.errors import EngineError
from mlx_parallm.rl.environments import Task


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`group_size` samples a task, of at most `max_tokens`, at `temperature`. `seed`: of the samples."""

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0


class Rollouts:
    """Draws groups of trajectories. Event loop's thread only.

    Args:
        engine: one that collects.
        tasks: endless.
        tell: called with the number of trajectories that have just ended.
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
        self._engine = engine
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._settings = settings
        self._tell = tell
        self._numbers = itertools.count()

    async def draw(self, groups: int, selector: str) -> int:
        """Answers the next `groups` tasks with what `selector` means now; how many tokens were drawn.

        Raises:
            EngineError, RequestError: a task could not be answered.
        """
        tasks = await asyncio.to_thread(lambda: list(itertools.islice(self._tasks, groups)))
        return sum(await asyncio.gather(*(self._answer(task, selector) for task in tasks)))

    async def _answer(self, task: Task, selector: str) -> int:
        number, settings = next(self._numbers), self._settings
        with self._adapters.lease(selector) as adapter:
            request = GenerationRequest(
                request_id=f"rollout-{settings.seed}-{number}",
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
