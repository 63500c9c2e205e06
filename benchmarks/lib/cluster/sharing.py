"""How long a new adapter version takes to every node: fetching its archive, and staging it beside rows that decode."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.lib.adapters.files import write_adapters
from benchmarks.lib.cluster.nodes import TOKEN, Nodes
from benchmarks.lib.load import Stream, greedy
from mlx_parallm import __version__
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.cluster.archive import pack
from mlx_parallm.extras.cluster.cards import Joining, NodeRole, SharedVersion
from mlx_parallm.extras.cluster.connection import NatsAddress, connect
from mlx_parallm.extras.cluster.head_client import HeadClient
from mlx_parallm.extras.cluster.members import Members
from mlx_parallm.extras.cluster.node import build_of, running
from mlx_parallm.extras.cluster.publisher import Publisher
from mlx_parallm.extras.cluster.versions import Versions

ROWS, ROW_TOKENS = 16, 2000
NAME = "shared"


@dataclass(frozen=True, slots=True)
class Shared:
    """Seconds of one version.

    `fetched_s`: until two processes had pulled and checked it at the same time, while no row ran. `published_s`: from
    the beginning of its upload until it was live, with all nodes holding it, beside the rows.
    """

    bytes: int
    fetched_s: float
    published_s: float


def adapter_folders(folder: Path, count: int) -> list[Path]:
    """Adapters of the bundled model of about 20 MB each."""
    names = [str(number) for number in range(count)]
    making = multiprocessing.get_context("spawn").Process(target=write_adapters, args=(folder, names))
    making.start()
    making.join()
    return [folder / name for name in names]


async def share(nodes: Nodes, adapters: Sequence[Path]) -> list[Shared]:
    """Publishes each adapter twice: while no row runs, and fetches it then; and beside `ROWS` rows of one replica."""
    async with HeadClient(nodes.address, TOKEN) as client:
        joined = await client.join(Joining(NodeRole.TRAINER, "", None, __version__))
        async with connect(NatsAddress(joined.nats_url, joined.nats_token), "trainer") as connection:
            members = Members(connection, build_of(joined.base.fingerprint))
            publisher = Publisher(client, Versions(connection), members)
            async with running(members.run()):
                while len(members.present()) < 1 + len(nodes.replicas):
                    await asyncio.sleep(0.1)
                archives = [await asyncio.to_thread(pack, each) for each in adapters]
                fetched = [await _fetched(nodes, publisher, each) for each in enumerate(archives, 1)]
                async with running(*_rows(nodes)):
                    beside = list(enumerate(archives, 1 + len(archives)))
                    published = [await _published(publisher, each) for each in beside]
    return [Shared(len(archive), *each) for archive, *each in zip(archives, fetched, published, strict=True)]


async def _fetched(nodes: Nodes, publisher: Publisher, version: tuple[int, bytes]) -> float:
    number, archive = version
    live = await publisher.publish(AdapterRef(NAME, number), archive)
    return await _fetched_by_two(nodes.address, live.version)


async def _published(publisher: Publisher, version: tuple[int, bytes]) -> float:
    number, archive = version
    started = time.perf_counter()
    await publisher.publish(AdapterRef(NAME, number), archive)
    return time.perf_counter() - started


async def _fetched_by_two(address: str, version: SharedVersion) -> float:
    context = multiprocessing.get_context("spawn")
    begin, done = context.Barrier(3), context.Queue()
    pulling = [context.Process(target=_pull, args=(address, version, begin, done)) for _ in range(2)]
    for process in pulling:
        process.start()
    await asyncio.to_thread(begin.wait)
    taken = [await asyncio.to_thread(done.get) for _ in pulling]
    for process in pulling:
        await asyncio.to_thread(process.join)
    return max(taken)


def _pull(address: str, version: SharedVersion, begin: Barrier, done: Queue[float]) -> None:
    async def pull() -> float:
        async with HeadClient(address, TOKEN) as client:
            begin.wait()
            started = time.perf_counter()
            await client.adapter(version)
            return time.perf_counter() - started

    done.put(asyncio.run(pull()))


def _rows(nodes: Nodes) -> list[Coroutine[Any, Any, None]]:
    """Streams of one replica's own clients, which no router moves."""
    return [_stream_again(nodes.replicas[0].port, number) for number in range(ROWS)]


async def _stream_again(port: int, number: int) -> None:
    while True:
        with suppress(OSError):
            await Stream(port, {"prompt": f"Row {number}:", "ignore_eos": True, **greedy(ROW_TOKENS)}).run()
