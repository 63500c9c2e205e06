"""Serving → draining → expired: how the server stops."""

from __future__ import annotations

import asyncio


class Lifecycle:
    """Where the server is on its way out. Used on the event loop's thread, or from a signal handler.

    `begin_drain`: requests under way go on, new generation requests get 503 and so does `/ready`.
    `expire`: the time limit is over, requests under way are ended with an error.
    """

    def __init__(self) -> None:
        self.draining = False
        self.expired = asyncio.Event()

    def begin_drain(self) -> None:
        self.draining = True

    def expire(self) -> None:
        self.draining = True
        self.expired.set()
