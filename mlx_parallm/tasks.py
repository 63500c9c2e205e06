"""Tasks that nobody waits for, and calls that run to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def spawn(
    work: Coroutine[Any, Any, T], log: logging.Logger, what: str, context: Context | None = None
) -> asyncio.Task[T]:
    """Runs `work` as a task. If it raises, that is logged with its traceback: "`what` failed". The caller keeps the
    task, as asyncio does not. `context`: of the task; None: the caller's."""
    task = asyncio.create_task(work, context=context)
    log_failure(task, log, what)
    return task


def log_failure(task: asyncio.Task[Any], log: logging.Logger, what: str) -> None:
    """Logs what ends the task, once it has ended, unless it is cancelled."""

    def ended(_: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", what, exc_info=error)

    task.add_done_callback(ended)


async def release(close: Callable[[], None]) -> None:
    """Runs `close`, which blocks, in a worker thread. It runs even if the caller is cancelled again meanwhile, as
    `asyncio.run` does with every task that is left. (`asyncio.to_thread` drops a call that no thread has begun.)"""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, close))
