"""Serving → draining → expired: how the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from mlx_parallm.server.errors import DrainingError

T = TypeVar("T")


class Lifecycle:
    """Where the server is on its way out. Used on the event loop's thread, or from a signal handler.

    `begin_drain`: requests under way go on, new generation requests get 503 and so does `/ready`; listeners
    to events, who would never leave, are sent home.
    `expire`: the time limit is over, requests under way are ended with an error.
    """

    def __init__(self) -> None:
        self.drain_begun = asyncio.Event()
        self.expired = asyncio.Event()
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def draining(self) -> bool:
        return self.drain_begun.is_set()

    @property
    def working(self) -> bool:
        """Whether work that `see_through` began is still to end."""
        return bool(self._work)

    async def see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on to its end even if nobody waits for it any more.

        Raises:
            DrainingError: nothing new is begun; `work` was not started.
        """
        if self.draining:
            work.close()
            raise DrainingError("draining")
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return await asyncio.shield(task)

    def begin_drain(self) -> None:
        self.drain_begun.set()

    def expire(self) -> None:
        self.drain_begun.set()
        self.expired.set()
