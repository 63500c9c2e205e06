"""Changes: the tasks that change what is trained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Changes:
    """The changes under way. A change that has begun is finished even if its caller is cancelled; only `cancel` ends
    it. Event loop's thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finished(self, change: Coroutine[Any, Any, T]) -> T:
        """Waits for a change."""
        return await asyncio.shield(self.spawn(change))

    def spawn(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Begins a change. `context`: of its task; None: the caller's."""
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def cancel(self) -> None:
        """Gives up all changes, and returns when they have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a change of training failed: %s", error)  # its caller gets the error
