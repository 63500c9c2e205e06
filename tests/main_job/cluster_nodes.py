"""A head, replicas and trainers as processes of their own, on ports of this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from lora import layout_of, random_adapter
from main_job.serving import Server, free_port, start
from tiny import save_tiny

from mlx_parallm import __version__
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.cluster.archive import pack
from mlx_parallm.extras.cluster.cards import Joining, NodeRole
from mlx_parallm.extras.cluster.connection import Connection, NatsAddress, connect
from mlx_parallm.extras.cluster.head_client import HeadClient
from mlx_parallm.extras.cluster.members import Members
from mlx_parallm.extras.cluster.node import build_of, running
from mlx_parallm.extras.cluster.publisher import Publisher
from mlx_parallm.extras.cluster.versions import Versions

TOKEN = "the-token-of-the-tests"
TRAIN = (sys.executable, "-c", "import sys; from mlx_parallm.cli.main import train; sys.exit(train())")
PROMPT = "The quick brown fox jumps over the lazy dog"
T = TypeVar("T")


class Cluster:
    """Starts nodes, and stops them all when the block ends."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self.port = free_port()
        self.nodes: list[Server] = []
        self.trainers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            assert node.process is not None
            node.process.kill()
            node.process.wait()
            node.http.close()
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def head(self, *flags: str) -> Server:
        return self._start("--share-model", "--model-path", str(self._model), *flags, port=self.port)

    def replica(self, *flags: str) -> Server:
        return self._start("--connect-to", self.address, *flags, port=free_port())

    def trainer(self, run: str, *flags: str) -> subprocess.Popen[str]:
        """`mlx_parallm_train` as a user starts it. `run`: the name of its folder, where `train.log` is."""
        folder = self._folder / run
        folder.mkdir(exist_ok=True)
        common = (
            "--cluster-token",
            TOKEN,
            "--cluster-dir",
            str(self._folder / "cluster"),
            "--connect-to",
            self.address,
        )
        shape = ("--lora-rank", "4", "--lora-alpha", "8", "--plot", str(folder / "curves.png"))
        with (folder / "train.log").open("a") as log:
            command = (*TRAIN, *common, *shape, "--checkpoint-dir", str(folder / "checkpoints"), *flags)
            trainer = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        self.trainers.append(trainer)
        return trainer

    def said(self, run: str) -> str:
        """What the trainers of a run have said."""
        return (self._folder / run / "train.log").read_text()

    def journal(self, run: str) -> Path:
        return self._folder / run / "checkpoints" / "journal.sqlite"

    def _start(self, *flags: str, port: int) -> Server:
        common = ("--host", "127.0.0.1", "--cluster-token", TOKEN, "--cluster-dir", str(self._folder / "cluster"))
        node = start("--log-level", "warning", *common, *flags, port=port)
        self.nodes.append(node)
        return node

    def publish(self, name: str, number: int, adapter: Path) -> None:
        """Publishes the adapter in a folder, as a trainer does."""

        async def work(client: HeadClient, connection: Connection, members: Members) -> None:
            archive = await asyncio.to_thread(pack, adapter)
            await Publisher(client, Versions(connection), members).publish(AdapterRef(name, number), archive)

        self.as_trainer(work)

    def as_trainer(self, work: Callable[[HeadClient, Connection, Members], Awaitable[T]]) -> T:
        async def main() -> T:
            async with HeadClient(self.address, TOKEN) as client:
                joined = await client.join(Joining(NodeRole.TRAINER, "", None, __version__))
                async with connect(NatsAddress(joined.nats_url, joined.nats_token), "trainer") as connection:
                    members = Members(connection, build_of(joined.base.fingerprint))
                    async with running(members.run()):
                        return await work(client, connection, members)

        return asyncio.run(main())


def until(condition: Callable[[], T], seconds: float = 30.0) -> T:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


def nodes_of(server: Server) -> dict[str, Any]:
    """The nodes that the head sees, by their address."""
    return {node["url"]: node for node in server.get("/v1/cluster")["nodes"]}


def nats_of(head: Server) -> int:
    """The process id of its NATS server."""
    assert head.process is not None
    command = ["pgrep", "-P", str(head.process.pid), "nats-server"]
    return int(until(lambda: subprocess.run(command, capture_output=True, text=True).stdout))


def joined(cluster: Cluster, replicas: int) -> tuple[Server, list[Server]]:
    head = cluster.head()
    others = [cluster.replica() for _ in range(replicas)]
    until(lambda: sum(node["ready"] for node in nodes_of(head).values()) == replicas + 1)
    return head, others


def adapters_for(folder: Path, contents: int) -> Path:
    """A folder with a tiny model and so many adapters for it."""
    layout = layout_of(save_tiny("llama", folder / "model"))
    for number in range(1, contents + 1):
        write_peft(folder / f"adapter-{number}", random_adapter(layout, number, rank=4), layout, None)
    return folder


def body(number: int = 0, tokens: int = 24, **fields: Any) -> dict[str, Any]:
    return {
        "model": "math",
        "prompt": f"{number}: {PROMPT}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def answer(server: Server, number: int, tokens: int = 24, **fields: Any) -> tuple[str, str]:
    """The text, and the adapter version that it says it is of."""
    found = server.post("/v1/completions", **body(number, tokens, **fields))
    return found["choices"][0]["text"], found["lora_adapter"]


def answer_or_none(server: Server) -> tuple[str, str] | None:
    found = server.http.post("/v1/completions", json=body(0))
    return (found.json()["choices"][0]["text"], found.json()["lora_adapter"]) if found.is_success else None
