"""Connection: a node's connection to NATS, with the buckets and the stream of a cluster.

    bucket nodes          who is there; a key lives for LEASE_S after its last renewal   `members`
    bucket versions       which adapter versions there are, and which one is live        `versions`
    bucket trainer        who trains an adapter; a key lives for TRAINER_LEASE_S         `trainer`
    stream trajectories   what was sampled for training and is not yet in a checkpoint    `trajectories`

nats-py connects again by itself, for ever. What NATS does while nobody is connected is in its documentation:
https://docs.nats.io/nats-concepts/jetstream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from mlx_parallm.errors import ConfigError, StorageError

LEASE_S = 3.0
"""How long a node counts as present after its last renewal, in seconds."""
TRAINER_LEASE_S = 10.0
TRAJECTORIES = "trajectories"
"""The stream, and the beginning of its subjects: `trajectories.NAME`."""
MOST_WAITING, MOST_BYTES = 100_000, 1 << 30
"""So many messages of each adapter fit the stream, and so many bytes in all. New ones are refused when it is full."""
DUPLICATES_S = 24 * 3600.0
"""How long NATS remembers the ids of trajectories, in seconds. One with an id that it remembers is dropped."""
PROBE = "probe.storage"
"""The key of `Connection.probe`: no node, version or adapter has it."""
_FULL_STREAM = "maximum"
_RETRY_S = 0.2
_TIMEOUT_S = 2.0
_CONNECT_S = 5.0

_log = logging.getLogger(__name__)


class NatsUnreachableError(ConfigError):
    """NATS does not answer now at its address, or refuses the token."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """Where NATS is. `token`: empty if it wants none."""

    url: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Change:
    """The value of a key as it is now. None: the key was deleted, or has expired."""

    key: str
    value: bytes | None
    revision: int


class Connection:
    """Gives the buckets and the stream. `connect` makes one."""

    def __init__(self, client: Client, js: JetStreamContext, buckets: dict[str, KeyValue]) -> None:
        self.client = client
        self.js = js
        self.nodes, self.versions, self.trainer = (buckets[name] for name in ("nodes", "versions", "trainer"))
        self._watchers: set[KeyValue.KeyWatcher] = set()

    @property
    def connected(self) -> bool:
        """Whether NATS can be reached now."""
        return bool(self.client.is_connected)

    async def follow(self, bucket: KeyValue) -> AsyncIterator[Change | None]:
        """Yields every key of a bucket, then None, then each change. After the connection was lost, all of this comes
        again, because changes may have been missed."""
        while not self.client.is_closed:
            try:
                watcher = await bucket.watchall()
            except NatsError:  # there is no connection now
                await asyncio.sleep(_RETRY_S)
                continue
            self._watchers.add(watcher)
            try:
                async with aclosing(_changes(watcher)) as changes:
                    async for change in changes:
                        yield change
            finally:
                self._watchers.discard(watcher)
                with suppress(NatsError):  # what is closed already
                    await watcher.stop()

    async def probe(self) -> None:
        """Returns when NATS has stored something in each bucket and in the stream.

        Raises:
            NatsError: it does not. A stream that has as many messages as it may have does not count.
        """
        for bucket in (self.nodes, self.versions, self.trainer):
            await bucket.put(PROBE, b"")
        try:
            kept = await self.js.publish(f"{TRAJECTORIES}.{PROBE}", b"")
        except APIError as error:
            if _FULL_STREAM not in str(error.description):
                raise
        else:
            await self.js.delete_msg(TRAJECTORIES, kept.seq)

    async def begin_again(self) -> None:
        """Ends all watchers, so that `follow` begins again. Called when the connection is there again."""
        for watcher in list(self._watchers):
            with suppress(NatsError):
                await watcher.stop()

    async def close(self) -> None:
        """Closes the connection, which ends every `follow`."""
        await self.begin_again()
        await _close(self.client)


async def _changes(watcher: KeyValue.KeyWatcher) -> AsyncGenerator[Change | None, None]:
    async for entry in watcher:
        if entry is None:
            yield None
        else:
            gone = entry.operation in (KV_DEL, KV_PURGE)
            yield Change(entry.key, None if gone else entry.value or b"", entry.revision or 0)


@asynccontextmanager
async def connect(address: NatsAddress, name: str) -> AsyncIterator[Connection]:
    """Connects to NATS, and makes the buckets and the stream if they are not there yet. Closes the connection when the
    block ends.

    Args:
        name: what NATS calls this connection in its own statistics.

    Raises:
        NatsUnreachableError: it does not answer there now, or refuses the token.
        ConfigError: it has no JetStream.
    """
    opened: list[Connection] = []

    async def reconnected() -> None:
        _log.info("connected to NATS again")
        for connection in opened:
            await connection.begin_again()

    client = await _reached(address, name, reconnected)
    try:
        opened.append(await _opened(client))
        yield opened[0]
    finally:
        for connection in opened:
            await connection.close()
        await _close(client)


async def _reached(address: NatsAddress, name: str, reconnected: Callable[[], Awaitable[None]]) -> Client:
    """A client that connects again for ever once it has been connected."""
    problems: list[Exception] = []

    async def lost() -> None:
        if not client.is_closed:
            _log.warning("the connection to NATS is lost; trying to connect again")

    async def failed(error: Exception) -> None:
        problems[:] = [error]

    client = Client()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await client.connect(
                address.url,
                token=address.token or None,
                name=name,
                allow_reconnect=False,  # a wrong token ends the first attempt
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RETRY_S,
                ping_interval=1,
                max_outstanding_pings=2,
                reconnected_cb=reconnected,
                disconnected_cb=lost,
                error_cb=failed,
            )
    except (NatsError, OSError, TimeoutError) as error:
        await _close(client)
        reason = problems[0] if problems else error
        raise NatsUnreachableError(
            f"NATS cannot be reached at {address.url}: {reason}; check that it runs there, and the token"
        ) from error
    client.options["allow_reconnect"] = True
    return client


async def _close(client: Client) -> None:
    """Closes a client, also one that has lost its connection, which then cannot be flushed."""
    with suppress(OSError, NatsError):
        await client.close()


async def _opened(client: Client) -> Connection:
    js = client.jetstream(timeout=_TIMEOUT_S)
    try:
        buckets = {config.bucket: await js.create_key_value(config) for config in _buckets()}
        await js.add_stream(_trajectories())
    except NatsTimeoutError as error:
        raise NatsUnreachableError(f"NATS does not answer: {error}") from error
    except NatsError as error:
        raise ConfigError(
            f"NATS cannot keep the cluster's state: {error}; start it with JetStream, or leave out --nats-url"
        ) from error
    return Connection(client, js, buckets)


def _buckets() -> tuple[KeyValueConfig, ...]:
    file = StorageType.FILE
    return (
        KeyValueConfig("nodes", history=1, ttl=LEASE_S, storage=file),
        KeyValueConfig("versions", history=1, storage=file),
        KeyValueConfig("trainer", history=1, ttl=TRAINER_LEASE_S, storage=file),
    )


def _trajectories() -> StreamConfig:
    """Each trajectory stays until it is acknowledged, which the trainer does when its update is in a checkpoint."""
    return StreamConfig(
        name=TRAJECTORIES,
        subjects=[f"{TRAJECTORIES}.>"],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        duplicate_window=DUPLICATES_S,
        max_msgs_per_subject=MOST_WAITING,
        max_bytes=MOST_BYTES,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
    )


def key_of(name: str) -> str:
    """The name of an adapter as a part of a key or a subject. NATS divides those at dots, so a dot is written `=`,
    which no name has."""
    return name.replace(".", "=")


@asynccontextmanager
async def stored() -> AsyncIterator[None]:
    """Raises what NATS raises in the block as StorageError."""
    try:
        yield
    except NatsError as error:
        raise StorageError(f"the cluster's registry cannot be reached: {str(error) or type(error).__name__}") from error
