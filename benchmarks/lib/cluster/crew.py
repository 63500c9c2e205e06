"""The processes of a cluster whose parts are to fail: a head with its NATS server, two replicas and a trainer, joined
by links that can be cut (`links`)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.cluster.links import Link
from benchmarks.lib.load import HOST, get_json
from benchmarks.lib.peers import free_port

TOKEN = "token-of-the-benchmark"
ADAPTER = "default"
READY_S = 120.0
_SERVE = (sys.executable, "-m", "mlx_parallm", "serve", "--mode", "inference", "--host", HOST)
_TRAIN = (sys.executable, "-c", "from mlx_parallm.cli.main import train; raise SystemExit(train())", "--mode", "rl")
_COMMON = ("--log-level", "warning", "--cluster-token", TOKEN)
_LESSON = ("--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "1e-3", "--group-size", "2")
_RUN = ("--prompts-per-step", "4", "--max-staleness", "100000", "--checkpoint-interval", "5")
_ALL_KEPT = ("--journal-updates", "1000000")  # so that the journal says of each answer what became of it
_REWARD = "import zlib\n\ndef score(completion):\n    return zlib.crc32(completion.encode()) / 2**32\n"
CLOCK, VERSION = "CLUSTER_FAULTS_CLOCK_S", "CLUSTER_FAULTS_VERSION"
_STRANGE = f"""
import os, time
if "{CLOCK}" in os.environ:
    _time = time.time
    time.time = lambda: _time() + float(os.environ["{CLOCK}"])
if "{VERSION}" in os.environ:
    import mlx_parallm
    mlx_parallm.__version__ = os.environ["{VERSION}"]
"""
"""A module that Python imports when it starts: a process with another clock, or another version of the package."""


@dataclass
class Process:
    """One process of the cluster, which may be killed and started again with the same flags."""

    name: str
    command: tuple[str, ...]
    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, **environment: str) -> None:
        own = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(self.folder / "strange"), **environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def start_and_wait(self, **environment: str) -> None:
        """Starts the process, and returns when it answers requests; at once if it is no server."""
        self.start(**environment)
        if self.port:
            await until(lambda: _answers(self.port), READY_S)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@dataclass
class Crew:
    """All of them. `links`: by the two ends, such as `replica-head`, which a replica uses to reach its head."""

    head: Process
    replicas: list[Process]
    trainer: Process
    disk: Path
    """Of the head's state."""
    links: dict[str, Link] = field(default_factory=dict)

    @property
    def nats(self) -> int:
        """The process id of the NATS server. Raises ProcessLookupError: there is none now."""
        command = ["pgrep", "-P", str(self.head.pid), "nats-server"]
        found = subprocess.run(command, capture_output=True, text=True).stdout
        if not found:
            raise ProcessLookupError("no NATS server")
        return int(found.split()[0])

    @property
    def journal(self) -> Path:
        return self.trainer.folder / "checkpoints" / "journal.sqlite"

    async def status(self, process: Process) -> dict[str, Any]:
        """What a node says of the cluster. Raises OSError: it does not answer."""
        answer: dict[str, Any] = await asyncio.wait_for(get_json(process.port, "/v1/cluster"), 5)
        return answer

    async def live(self) -> int | None:
        """The number of the version that all nodes serve; None if not all are here, or they serve different ones."""
        nodes = [self.head, *self.replicas]
        try:
            statuses = [await self.status(node) for node in nodes]
        except OSError:  # a timeout is one too
            return None
        numbers = {number for status in statuses for number in _live_in(status)}
        seen = statuses[0]["nodes"]
        serving = [node for node in seen if node["ready"]]
        whole = len(serving) == len(nodes) and any(node["role"] == "trainer" for node in seen)
        if not whole or len(numbers) != 1 or not all(status["connected"] for status in statuses):
            return None
        (number,) = numbers
        return number if all(f"{ADAPTER}@{number}" in node["holds"] for node in serving) else None

    async def stop(self) -> None:
        """Kills all processes and closes the links."""
        for process in (self.trainer, *self.replicas, self.head):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for link in self.links.values():
            await link.close()


def _live_in(status: dict[str, Any]) -> list[int]:
    return [each["version"] for each in status["versions"] if each["live"] and each["name"] == ADAPTER] or [0]


@asynccontextmanager
async def crew(model: Path, folder: Path, disk: Path) -> AsyncIterator[Crew]:
    """Runs them until the block ends. `disk`: where the head keeps its state."""
    for each in ("strange", "trainer"):
        (folder / each).mkdir(exist_ok=True)
    (folder / "strange" / "sitecustomize.py").write_text(_STRANGE)
    (folder / "rewards.py").write_text(_REWARD)
    serve = (*_SERVE, *_COMMON, "--model-path", str(model))
    ports = [free_port() for _ in range(3)]
    state = ("--share-model", "--cluster-dir", str(disk / "cluster"), "--port", str(ports[0]))
    head = Process("head", (*serve, *state), folder, ports[0])
    running = Crew(head, [], Process("trainer", (), folder / "trainer"), disk)
    (folder / "trainer" / "strange").symlink_to(folder / "strange")
    try:
        await head.start_and_wait()
        nats = json.loads((disk / "cluster" / "nats" / "nats.json").read_text())["port"]
        for number, port in enumerate(ports[1:], 1):
            there = await _links(running, f"replica{number}", ports[0], nats)
            back = running.links[f"head-replica{number}"] = Link(port)
            await back.mend()
            own = ("--cluster-dir", str(folder / f"replica{number}"), "--advertise", f"{HOST}:{back.port}")
            join = ("--connect-to", f"{HOST}:{there}", "--port", str(port))
            running.replicas.append(Process(f"replica{number}", (*serve, *own, *join), folder, port))
            running.replicas[-1].start()
        there = await _links(running, "trainer", ports[0], nats)
        kept = ("--checkpoint-dir", str(running.journal.parent), "--plot", str(folder / "trainer" / "curves.png"))
        reward = ("--reward", f"{folder / 'rewards.py'}:score", "--model-path", str(model))
        join = ("--connect-to", f"{HOST}:{there}", "--cluster-dir", str(folder / "trainer" / "cluster"))
        running.trainer.command = (*_TRAIN, *_COMMON, *_LESSON, *_RUN, *_ALL_KEPT, *kept, *reward, *join)
        running.trainer.start()
        yield running
    finally:
        await running.stop()


async def _links(crew: Crew, name: str, head: int, nats: int) -> int:
    """Makes the links of a node to its head and to NATS. Returns the port of the first."""
    to_head, to_nats = Link(head), Link(nats)
    crew.links |= {f"{name}-head": to_head, f"{name}-nats": to_nats}
    await to_head.mend()
    await to_nats.mend()
    if len(str(to_nats.port)) != len(str(nats)):
        raise RuntimeError("the ports that this system gives have different lengths; try again")
    to_head.renamed = (f"{HOST}:{nats}".encode(), f"{HOST}:{to_nats.port}".encode())
    return to_head.port


async def _answers(port: int) -> bool:
    try:
        await asyncio.wait_for(get_json(port, "/ready"), 5)
    except OSError:
        return False
    return True


async def until(condition: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds until a condition, which is awaited, was true. Raises TimeoutError: it was not in time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not await condition():
        if loop.time() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s")
        await asyncio.sleep(0.1)
    return loop.time() - began
