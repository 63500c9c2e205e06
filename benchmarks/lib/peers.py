"""Starts the servers that are compared. All stay loaded but stopped (SIGSTOP), except the one that is being measured.

Each runs in its own session, so that Ctrl-C reaches only the benchmark, which then kills them.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib.load import HOST, get_json

PROGRAMS = Path(__file__).parent / "programs"
OUR_SERVER = Path(sys.executable).with_name("mlx_parallm_serve")
MLX_LM = "mlx_lm.server"
MLX_LM_FLAGS = "--decode-concurrency 32 --prompt-concurrency 8"
START_LIMIT_S = 120
ORDER_LIMIT_S = 600
LINE_LIMIT = 2**24

R = TypeVar("R")


class PeerError(RuntimeError):
    """A process did not start, or it ended early."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A child process. `port` is 0 if it listens on none."""

    name: str
    process: asyncio.subprocess.Process
    port: int = 0

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGSTOP)


async def cancelled_by_sigterm(benchmark: Coroutine[Any, Any, R]) -> R:
    """Runs the benchmark. SIGTERM cancels it as Ctrl-C does, so that all child processes are killed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await benchmark


@asynccontextmanager
async def our_server(model: Path | None, logs: Path, flags: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """Runs `mlx_parallm_serve` and waits until it is ready. `model` None means the bundled model."""
    async with _serving(OUR_SERVER.name, [str(OUR_SERVER), *flags], model, logs) as peer:
        yield peer


@asynccontextmanager
async def server_of(checkout: Path, model: Path, logs: Path, flags: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """Runs the server of another checkout, from its `.venv`. The peer has the name of its commit."""
    commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    name = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    program = checkout / ".venv" / "bin" / OUR_SERVER.name
    own_blas = ["env", "-u", "OPENBLAS_THREAD_TIMEOUT"]  # this checkout has set it for the benchmark
    async with _serving(name, [*own_blas, str(program), *flags], model, logs) as peer:
        yield peer


@asynccontextmanager
async def _serving(name: str, command: Sequence[str], model: Path | None, logs: Path) -> AsyncIterator[Peer]:
    path = [] if model is None else ["--model-path", str(model)]
    async with _server(name, [*command, "--log-level", "warning", *path], "/ready", logs) as peer:
        yield peer


def our_server_has(flag: str) -> bool:
    """Whether `mlx_parallm_serve` has the flag."""
    shown = subprocess.run([str(OUR_SERVER), "--help-all"], capture_output=True, text=True, check=True).stdout
    return flag in shown


@asynccontextmanager
async def mlx_lm_server(model: Path, flags: Sequence[str], logs: Path) -> AsyncIterator[Peer]:
    """Runs `mlx_lm.server` and waits until it listens. It loads its model while the first request waits."""
    command = [sys.executable, str(PROGRAMS / "mlx_lm_server.py"), "--log-level", "WARNING", *flags]
    async with _server(MLX_LM, [*command, "--model", str(model)], "/health", logs) as peer:
        yield peer


@asynccontextmanager
async def program(name: str, flags: Sequence[str], logs: Path) -> AsyncIterator[Peer]:
    """Runs the server `programs/NAME.py` and waits until it answers `GET /health`."""
    async with _server(name, [sys.executable, str(PROGRAMS / f"{name}.py"), *flags], "/health", logs) as peer:
        yield peer


@asynccontextmanager
async def bare_loop(model: Path, logs: Path) -> AsyncIterator[Peer]:
    """Runs `programs/bare_loop.py` and waits until its model is loaded."""
    command = [sys.executable, str(PROGRAMS / "bare_loop.py"), str(model)]
    async with _child("bare loop", command, logs, piped=True) as process:
        await _line(process, START_LIMIT_S)
        yield Peer("bare loop", process)


async def run_bare(peer: Peer, prompts: Sequence[str], max_tokens: int) -> list[list[float]]:
    """Generates with the bare loop. Returns the times of each row's tokens."""
    assert peer.process.stdin is not None
    peer.process.stdin.write(json.dumps({"prompts": list(prompts), "max_tokens": max_tokens}).encode() + b"\n")
    rows: list[list[float]] = json.loads(await _line(peer.process, ORDER_LIMIT_S))
    return rows


@asynccontextmanager
async def _server(name: str, command: list[str], probe: str, logs: Path) -> AsyncIterator[Peer]:
    port = free_port()
    async with _child(name, [*command, "--host", HOST, "--port", str(port)], logs) as process:
        peer = Peer(name, process, port)
        await _until_answering(peer, probe)
        yield peer


@asynccontextmanager
async def _child(
    name: str, command: list[str], logs: Path, piped: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a child process, which is killed when the block ends. If the block fails, prints the end of the child's log.

    With `piped`, the caller gets stdin and stdout; otherwise stdout is logged like stderr.
    """
    log = logs / f"{name.replace(' ', '_')}.log"
    with log.open("ab") as written:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else written,
            stderr=written,
            limit=LINE_LIMIT,
            start_new_session=True,
        )
    try:
        yield process
    except Exception:  # the child's log may give the reason
        print(f"--- end of {name}'s log:\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_answering(peer: Peer, probe: str) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and peer.process.returncode is None:
        try:
            await get_json(peer.port, probe)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            return
    raise PeerError(f"{peer.name} does not answer {probe} (exit code {peer.process.returncode})")


async def _line(process: asyncio.subprocess.Process, limit_s: float) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(limit_s):
        line = await process.stdout.readline()
    if not line:
        raise PeerError(f"the process ended early (exit code {process.returncode})")
    return line


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])
