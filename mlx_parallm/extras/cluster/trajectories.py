"""The stream of a cluster's trajectories: what was sampled for training anywhere, until its trainer acknowledges it.

send ─▶ subject trajectories.NAME, on the disk of NATS ─▶ read ─▶ acknowledge ─▶ removed
                                                           └─ comes again after ACK_S without one
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from mlx_parallm.errors import ConflictError, StorageError
from mlx_parallm.extras.cluster.connection import TRAJECTORIES, Connection, key_of, stored

ACK_S = 60.0
"""After so many seconds without an acknowledgement, NATS delivers a message again."""
_UNACKNOWLEDGED = 100_000
"""So many messages may be delivered and not acknowledged."""
_SEND_S, _AGAIN_S, _WAIT_S = 10.0, 0.2, 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message. It comes again, to this trainer or the next one, until it is acknowledged."""

    body: bytes
    _message: Msg = field(repr=False)

    async def acknowledge(self) -> None:
        """Removes it from the stream. If that does not reach NATS, it comes again."""
        try:
            await self._message.ack()
        except NatsError as error:
            _log.debug("an acknowledgement was not sent: %s", error)


class Trajectories:
    """Sends to the stream and reads from it, on the event loop's thread."""

    def __init__(self, connection: Connection) -> None:
        self._js = connection.js
        self._client = connection.client

    async def send(self, name: str, body: bytes, message_id: str = "") -> None:
        """Returns when the message is on the disk of NATS.

        Args:
            name: the adapter that it is for.
            message_id: a second message with the same one is dropped. Empty: the message has none.

        Raises:
            StorageError: it could not be kept; it may be sent again with the same id.
        """
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        packed, deadline = await asyncio.to_thread(zlib.compress, body, 1), time.monotonic() + _SEND_S
        while True:
            try:
                await self._js.publish(_subject(name), packed, headers=headers)
                return
            except MaxPayloadError as error:
                raise StorageError(f"the cluster's NATS server takes no message of {len(packed)} bytes") from error
            except NatsError as error:  # NATS may be starting again; one that arrived all the same has the same id
                if not message_id or time.monotonic() > deadline:
                    reason = str(error) or type(error).__name__
                    raise StorageError(f"the cluster cannot keep it now: {reason}") from error
            await asyncio.sleep(_AGAIN_S)

    async def waiting(self, names: Iterable[str]) -> dict[str, int]:
        """How many messages for each of these adapters are in the stream. Raises StorageError: NATS cannot be
        reached."""
        async with stored():
            info = await self._js.stream_info(TRAJECTORIES, subjects_filter=f"{TRAJECTORIES}.>")
        return {name: (info.state.subjects or {}).get(_subject(name), 0) for name in names}

    async def read(self, name: str, fence: int) -> AsyncGenerator[Delivery, None]:
        """Yields the messages for an adapter: first all that were delivered before and not acknowledged, then those
        that come.

        Args:
            fence: the number of the trainer's lease. A reader with a lower one gets no more messages.

        Raises:
            ConflictError: there is a reader with a higher one.
        """
        subscription: JetStreamContext.PullSubscription | None = None
        while not self._client.is_closed:
            try:
                if subscription is None:
                    subscription = await self._subscribed(name, fence)
                (message,) = await subscription.fetch(1, timeout=_WAIT_S)
            except TimeoutError:  # nothing has come
                continue
            except NatsError as error:  # NATS may be starting again, and may have lost the request for a message
                _log.debug("trajectories cannot be read now: %s", error)
                subscription = None
                await asyncio.sleep(_AGAIN_S)
                continue
            body = await asyncio.to_thread(zlib.decompress, message.data)
            yield Delivery(body, message)

    async def _subscribed(self, name: str, fence: int) -> JetStreamContext.PullSubscription:
        """The one consumer of the subject. An earlier one is removed, so that all which its reader did not acknowledge
        is delivered again at once."""
        for other in await self._js.consumers_info(TRAJECTORIES):
            if other.config.filter_subject != _subject(name) or (last := _fence_of(other.name)) == fence:
                continue
            if last > fence:
                raise ConflictError(f"another trainer trains {name!r} in this cluster now")
            with suppress(NotFoundError):
                await self._js.delete_consumer(TRAJECTORIES, other.name)
        config = ConsumerConfig(
            durable_name=f"{key_of(name)}-{fence}",
            filter_subject=_subject(name),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_S,
            max_ack_pending=_UNACKNOWLEDGED,
        )
        await self._js.add_consumer(TRAJECTORIES, config)
        return await self._js.pull_subscribe_bind(durable=config.durable_name, stream=TRAJECTORIES)


def _fence_of(consumer: str) -> int:
    return int(consumer.rpartition("-")[2])


def _subject(name: str) -> str:
    return f"{TRAJECTORIES}.{key_of(name)}"
