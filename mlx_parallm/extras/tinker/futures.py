"""Futures: operations under way, and their results until the client has read them.

    start(id, work) ─▶ task ─▶ result, kept until it has been read, or for `KEPT_S`

A client asks for a result by its id, as often as it wants. So a lost connection loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import ConflictError, OverloadedError, ParaLLMError
from mlx_parallm.extras.tinker.answers import TinkerAnswer, failure
from mlx_parallm.extras.tinker.sessions import mark_of, room_in
from mlx_parallm.server.access import NamedKey
from mlx_parallm.server.errors import ExpiredError

MAX_FUTURES = 10_000
MAX_WAITING_BYTES = 512 * 2**20
"""Bytes of the bodies of operations that are not finished."""
KEPT_S, KEPT_AFTER_READING_S = 900.0, 60.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PendingAnswer:
    """One operation. `digest`: of its request. `nbytes`: of its request's body. Times are those of `time.monotonic`."""

    request_id: str
    owner: str
    digest: bytes
    nbytes: int
    task: asyncio.Task[TinkerAnswer]
    ended_at: float | None = None
    read_at: float | None = None

    def outdated(self, now: float) -> bool:
        """Whether its result need not be kept any longer."""
        if self.read_at is not None:
            return now - self.read_at > KEPT_AFTER_READING_S
        return self.ended_at is not None and now - self.ended_at > KEPT_S


@dataclass(slots=True)
class Futures:
    """The operations of all sessions, by the id of their request. Event loop's thread only.

    Invariant: `waiting_bytes` has the bytes of the operations that have not ended, by the marks of their keys.
    """

    waiting_bytes: Counter[str] = field(default_factory=Counter)
    _pending: dict[str, PendingAnswer] = field(default_factory=dict)
    _held: Counter[str] = field(default_factory=Counter)
    """How many operations there are, by the marks of their keys."""

    def __len__(self) -> int:
        return len(self._pending)

    def check_room(self, key: NamedKey, nbytes: int) -> None:
        """Raises OverloadedError if there is no room for another operation of the key whose body has `nbytes` bytes."""
        if not room_in(MAX_FUTURES, self._held, key):
            self.sweep()
        fits = not nbytes or room_in(MAX_WAITING_BYTES, self.waiting_bytes, key, nbytes)
        if not (fits and room_in(MAX_FUTURES, self._held, key)):
            raise OverloadedError("Too many Tinker operations are under way; try again.", retry_after_s=1)

    def start(
        self,
        request_id: str,
        owner: str,
        digest: bytes,
        nbytes: int,
        work: Coroutine[Any, Any, TinkerAnswer],
        held: ExitStack | None = None,
    ) -> None:
        """Runs `work`. An error of it becomes its result.

        Args:
            owner: the session, with which the operation ends.
            held: what the operation holds; closed when it has ended, also if it never began.
        """
        task = asyncio.create_task(_answered(request_id, work))
        pending = self._pending[request_id] = PendingAnswer(request_id, owner, digest, nbytes, task)
        self._held[mark_of(request_id)] += 1
        self.waiting_bytes[mark_of(request_id)] += nbytes

        def ended(_: asyncio.Task[TinkerAnswer]) -> None:
            self.waiting_bytes[mark_of(request_id)] -= nbytes
            pending.ended_at = time.monotonic()
            work.close()  # cancelled before it began, it would be reported as forgotten
            if held is not None:
                held.close()

        task.add_done_callback(ended)

    def repeated(self, request_id: str, digest: bytes) -> bool:
        """Whether the same request was started before, and its result is not forgotten.

        Raises:
            ConflictError: another request has that id.
        """
        pending = self._pending.get(request_id)
        if pending is not None and pending.digest != digest:
            raise ConflictError("seq_id: another request has this number: count on", param="seq_id")
        return pending is not None

    async def result(self, request_id: str, wait_s: float) -> TinkerAnswer | None:
        """The result of an operation; None if it is not there within `wait_s` seconds.

        Raises:
            ExpiredError: there is no such operation, or its result was kept long enough.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            raise no_operation(request_id)
        await asyncio.wait([pending.task], timeout=wait_s)
        if not pending.task.done():
            return None
        if pending.task.cancelled():
            raise ExpiredError("The operation was cancelled.")
        pending.read_at = pending.read_at or time.monotonic()
        return pending.task.result()

    def cancel(self, request_id: str) -> None:
        """Ends an operation early, if it is under way."""
        if (pending := self._pending.get(request_id)) is not None:
            pending.task.cancel()

    def drop(self, owner: str) -> None:
        """Ends the operations of a session, and forgets their results."""
        for pending in [each for each in self._pending.values() if each.owner == owner]:
            pending.task.cancel()
            self._forget(pending)

    def sweep(self) -> None:
        """Forgets results that were kept long enough."""
        now = time.monotonic()
        for pending in [each for each in self._pending.values() if each.outdated(now)]:
            self._forget(pending)

    def _forget(self, pending: PendingAnswer) -> None:
        del self._pending[pending.request_id]
        self._held -= Counter((mark_of(pending.request_id),))


def no_operation(request_id: str) -> ExpiredError:
    """The error about an operation that is not known."""
    return ExpiredError(f"No operation {request_id[:100]!r} is known, or its result is not kept any more.")


async def _answered(request_id: str, work: Coroutine[Any, Any, TinkerAnswer]) -> TinkerAnswer:
    try:
        return await work
    except ParaLLMError as error:
        return failure(error)
    except Exception as error:  # whatever it is, the client must get an end of its operation
        log.exception("the Tinker operation %s failed", request_id)
        return failure(error)
