"""Ends a request's work when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mlx_parallm.server.errors import DrainingError

T = TypeVar("T")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, over: asyncio.Event) -> T:
    """The result of `work`, unless the client leaves or `over` (a stage of the server's shutdown) is set first.

    `work` has ended, its cleanup included, when this returns. The request's body must have been read.

    Raises:
        ClientDisconnect: the client closed the connection; `work` was cancelled.
        DrainingError: `over` is set; `work` was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    expired = asyncio.create_task(over.wait())
    everything = (task, gone, expired)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if gone.done() else DrainingError("draining")
    finally:
        for waiting in everything:
            waiting.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
