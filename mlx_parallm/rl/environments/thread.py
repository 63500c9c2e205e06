"""EnvironmentThread: where the code of an environment runs. What blocks in it stops neither serving nor training.

event loop of the engine           thread of the environment
run(rollout) ────────────────────▶ rollout(client, task)
   answer ◀── client.ask() ◀──────────┘
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mlx_parallm.rl.environments.protocol import RolloutError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAST_WAIT_S = 0.02
_ANSWER_S = 1.0
"""A thread that does not react within this time, after a rollout took too long, is blocked."""

_END_S = 3.0
"""How long the end of a thread is waited for, in which the environment ends what it has started, such as tools."""


class EnvironmentThread:
    """Runs coroutines on an event loop of a daemon thread, with time limits. Used on one other event loop only.

    A thread that a rollout blocks is left behind, together with the rollouts that run on it, and the next one gets a
    new thread. One that was left behind ends when nothing blocks it, and does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._blocked = asyncio.Event()  # completes the waiting for all that runs on this thread

    async def run(self, coroutine: Callable[[], Coroutine[Any, Any, T]], left_s: Callable[[], float]) -> T:
        """The result of a coroutine.

        Args:
            left_s: the time that it may still take.

        Raises:
            RolloutError: it has taken too long, or another one blocks the thread.
            Exception: what it raised.
        """
        loop, blocked = self._running_loop(), self._blocked
        running = asyncio.run_coroutine_threadsafe(_guarded(coroutine), loop)
        result, left_behind = asyncio.wrap_future(running), asyncio.ensure_future(blocked.wait())
        either: tuple[asyncio.Future[Any], ...] = (result, left_behind)
        try:
            while not result.done() and not blocked.is_set():
                if left_s() <= 0:
                    running.cancel()
                    await self._check(loop, blocked)
                    raise RolloutError("the environment took too long")
                wait_s = max(left_s(), _LEAST_WAIT_S)
                await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise RolloutError("another rollout of the environment blocked its thread")
            return result.result()
        finally:
            left_behind.cancel()
            result.cancel()  # on its own loop too

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._blocked = asyncio.new_event_loop(), asyncio.Event()
            self._loop.set_default_executor(_DaemonThreads())
            self._thread = threading.Thread(
                target=_run, args=(self._loop, self._blocked), name="environment", daemon=True
            )
            self._thread.start()
        return self._loop

    async def _check(self, loop: asyncio.AbstractEventLoop, blocked: asyncio.Event) -> None:
        """Leaves the thread behind if it is blocked."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        except TimeoutError:
            blocked.set()
            if self._loop is loop:
                self._loop = None
            loop.call_soon_threadsafe(loop.stop)  # the thread ends once nothing blocks it

    def close(self) -> None:
        """Cancels what runs on the thread, and waits some seconds for its end. A blocked one is left behind."""
        if self._loop is not None and self._thread is not None:
            self._blocked.set()  # before `stop`, which the thread takes for the environment's otherwise
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._thread.join(_END_S)


async def _guarded(coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Turns what would end the thread, or look like a cancellation by the caller, into an error."""
    try:
        return await coroutine()
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RolloutError(f"the environment raised {type(error).__name__}") from error


def _run(loop: asyncio.AbstractEventLoop, left_behind: asyncio.Event) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not left_behind.is_set():  # the environment's own tasks and callbacks may end the loop before
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                _log.warning("the environment raised %s outside a rollout", type(error).__name__)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def in_daemon_thread(call: Callable[[], T], limit_s: float | None = None) -> T:
    """The result of a blocking call in a thread that does not keep the process from ending.

    Raises:
        TimeoutError: it took longer than `limit_s`. The call goes on in its thread.
        Exception: what it raised.
    """
    async with asyncio.timeout(limit_s):
        return await asyncio.wrap_future(_started(call))


class _DaemonThreads(ThreadPoolExecutor):
    """What `asyncio.to_thread` of an environment runs on: a thread for each call, which does not keep the process from
    ending as those of a pool do."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        return _started(lambda: function(*arguments, **keywords))


def _started(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="environment call", daemon=True).start()
    return future
