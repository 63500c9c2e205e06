"""Changes: the tasks that change what is trained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from mlx_parallm.tasks import log_failure, spawn

T = TypeVar("T")

_WHAT = "a change of training"

_log = logging.getLogger(__name__)


class Changes:
    """The changes under way. A change that has begun is finished even if its caller is cancelled; only `cancel` ends
    it. Event loop's thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finished(self, change: Coroutine[Any, Any, T]) -> T:
        """Waits for a change, and raises what it raises."""
        task = self._keep(asyncio.create_task(change))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            log_failure(task, _log, _WHAT)  # nobody else gets its error now
            raise

    def spawn(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Begins a change that nobody waits for. `context`: of its task; None: the caller's."""
        return self._keep(spawn(work, _log, _WHAT, context))

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Gives up all changes, and returns when they have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
