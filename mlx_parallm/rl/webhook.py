"""Webhook: posts every divergence to a URL. It can neither stop nor delay training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import httpx

from mlx_parallm.config import is_loopback
from mlx_parallm.core.json_values import as_json, utc
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.tasks import spawn

_MAX_QUEUED = 100
"""Divergences that may wait to be posted. Further ones are lost, and counted."""

_TIMEOUT_S = 5.0
_PAUSES_S = (1.0, 4.0)
"""Before a post that failed is tried again."""

_CLOSE_S = 5.0
"""Time that is left at the end for posts that wait."""

_TOO_MANY_REQUESTS = 429

_log = logging.getLogger(__name__)


class Webhook:
    """Posts divergences in order, one at a time. Event loop's thread only.

    A post is tried again if the receiver cannot be reached, is too slow, or answers 429 or 5xx. Redirects are not
    followed. Logs never have the URL, which is often a secret.

    Attributes:
        failures: divergences that were not posted.
    """

    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S, pauses_s: tuple[float, ...] = _PAUSES_S) -> None:
        self.failures = 0
        self._url = url
        self._timeout_s = timeout_s
        self._pauses_s = pauses_s
        self._queue: asyncio.Queue[dict[str, object]] = asyncio.Queue(_MAX_QUEUED)
        self._worker: asyncio.Task[None] | None = None

    def on_event(self, event: TrainingEvent) -> None:
        """Queues a training event, if it is a divergence."""
        if event.kind != "divergence":
            return
        try:
            self._queue.put_nowait(body_of(event))
        except asyncio.QueueFull:
            self._failed(f"it is too slow: {_MAX_QUEUED} divergences wait")
        if self._worker is None:
            self._worker = spawn(self._work(), _log, "the webhook for divergences")

    async def close(self) -> None:
        """Waits a little for what is queued, and ends."""
        if self._worker is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._queue.join()
        self._worker.cancel()
        with suppress(asyncio.CancelledError):
            await self._worker

    async def _work(self) -> None:
        while True:
            body = await self._queue.get()
            try:
                if why := await self._post(body):
                    self._failed(why)
            finally:
                self._queue.task_done()

    def _client(self) -> httpx.AsyncClient:
        direct = is_loopback(urlsplit(self._url).hostname or "")  # a proxy does not know this machine's addresses
        return httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=False, trust_env=not direct)

    async def _post(self, body: Mapping[str, object]) -> str:
        """Posts one body, with a client of its own each time, as what one is made of may fail, or change. Returns why
        that failed, or ""."""
        for pause_s in (*self._pauses_s, None):
            try:
                async with (
                    asyncio.timeout(self._timeout_s),
                    await asyncio.to_thread(self._client) as client,  # reading certificates takes a while
                    client.stream("POST", self._url, json=body) as response,
                ):
                    status = response.status_code  # its body is not read
            except Exception as error:  # noqa: BLE001 - whatever it is, later divergences are still posted
                why = type(error).__name__
            else:
                if status < 300:
                    return ""
                why = f"it answered with {status}"
                if status != _TOO_MANY_REQUESTS and status < 500:
                    return why
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return why

    def _failed(self, why: str) -> None:
        """Counts a failure. Only the first one is logged."""
        self.failures += 1
        if self.failures == 1:
            _log.warning("the webhook for divergences fails, and training goes on: %s", why)


def body_of(event: TrainingEvent) -> dict[str, object]:
    """The JSON object of a divergence: the data of its event, with `kind`, `at` (ISO-8601, UTC) and `text`, a sentence
    for people, which receivers such as Slack show. A value that is not finite is null."""
    data = as_json(event.data)
    text = f"Training of {data['adapter']} diverges at step {data['step']}: {data['reason']} ({data['action']})"
    return {"text": text, "kind": event.kind, "at": utc(event.at), **data}
