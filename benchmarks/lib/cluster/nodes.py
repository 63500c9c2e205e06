"""Starts a head and replicas, with the engines of their models or with paced ones."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.load import HOST, get_json
from benchmarks.lib.peers import Peer, PeerError, our_server, program

TOKEN = "token-of-the-benchmark"
READY_S = 60


@dataclass(frozen=True, slots=True)
class Paced:
    """How fast paced engines are. `passes_on`: the head leaves all requests to the replicas."""

    pace_s: float
    rows: int
    passes_on: bool = False

    def flags(self, head: bool) -> list[str]:
        flags = ["--pace", str(self.pace_s), "--rows", str(self.rows)]
        return [*flags, "--passes-on"] if head and self.passes_on else flags


@dataclass(frozen=True, slots=True)
class Nodes:
    """A running cluster."""

    head: Peer
    replicas: tuple[Peer, ...]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.head.port}"


def small_model(folder: Path) -> Path:
    """A model that loads at once, for servers whose engine is a paced one."""
    command = [sys.executable, "-m", "benchmarks.lib.programs.small_model", str(folder.absolute())]
    subprocess.run(command, check=True)
    return folder


@asynccontextmanager
async def cluster(model: Path | None, replicas: int, folder: Path, paced: Paced | None = None) -> AsyncIterator[Nodes]:
    """Runs a head and so many replicas, and waits until all of them take requests.

    Args:
        model: None means the bundled model.
        folder: of their logs and their state.
        paced: None: the model's own engine.
    """
    common = ["--cluster-token", TOKEN, "--cluster-dir", str(folder / "cluster")]
    async with AsyncExitStack() as running:
        head = await running.enter_async_context(node(model, [*common, "--share-model"], folder, paced, head=True))
        join = [*common, "--connect-to", f"{HOST}:{head.port}"]
        others = [await running.enter_async_context(node(model, join, folder, paced)) for _ in range(replicas)]
        await _until_ready(head, replicas + 1)
        yield Nodes(head, tuple(others))


@asynccontextmanager
async def node(
    model: Path | None, flags: Sequence[str], logs: Path, paced: Paced | None, head: bool = False
) -> AsyncIterator[Peer]:
    """Runs one server."""
    if paced is None:
        async with our_server(model, logs, flags) as peer:
            yield peer
        return
    path = [] if model is None else ["--model-path", str(model)]
    every = [*paced.flags(head), "--log-level", "warning", *path, *flags]
    async with program("paced_node", every, logs) as peer:
        yield peer


async def _until_ready(head: Peer, count: int) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        nodes = (await get_json(head.port, "/v1/cluster"))["nodes"]
        if sum(each["ready"] for each in nodes) == count:
            return
        await asyncio.sleep(0.1)
    raise PeerError(f"not all of {count} nodes are ready after {READY_S} s")
