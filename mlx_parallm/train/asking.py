"""Asks the device thread for work, and takes it back if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from mlx_parallm.core import DeviceThread
from mlx_parallm.errors import EngineDeadError

T = TypeVar("T")


async def ask_device(device: DeviceThread, ask: Callable[[], Future[T]], cancel: Callable[[Future[Any]], None]) -> T:
    """The result of what `ask` begins on the device thread, where its future is completed.

    Args:
        cancel: called on the device thread with that future if the caller is cancelled.

    Raises:
        Exception: what the future raises.
    """
    asked: list[Future[T]] = []

    def begin() -> Future[T]:
        asked.append(ask())
        return asked[0]

    def take_back() -> None:
        for future in asked:
            cancel(future)

    try:
        return await device.run(begin)
    except asyncio.CancelledError:
        with suppress(EngineDeadError):
            await device.run(take_back)
        raise
