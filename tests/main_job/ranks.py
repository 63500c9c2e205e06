"""A server on several ranks of this machine: `from main_job.ranks import launched, started`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from lora import layout_of, random_adapter
from main_job.serving import COMMAND, START_S, STOP_S, Server, free_port
from tiny import save_tiny

from mlx_parallm.adapters.formats import write_peft

HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
"""Two ranks get four heads of keys and values, one of which is zeros."""
Processes = list["subprocess.Popen[str]"]


def flags_of(family: str, folder: Path, **overrides: Any) -> list[str]:
    """A model, and two adapters of different ranks on all linears."""
    layout = layout_of(save_tiny(family, folder / "model", **HEADS, **overrides))
    for seed, name in enumerate(("one", "two"), start=1):
        write_peft(folder / "adapters" / name, random_adapter(layout, seed, rank=2 * seed), layout, None)
    return ["--model-path", str(folder / "model"), "--adapter-dir", str(folder / "adapters"), "--log-level", "warning"]


@contextmanager
def launched(flags: Sequence[str], ranks: int = 2) -> Iterator[Server]:
    """Started by `mlx.launch`, as a user does it. At the end all of it gets a signal, as from Ctrl-C: one to the
    launcher alone would leave the ranks running."""
    port = free_port()
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", str(ranks), "--backend", "ring", "--starting-port", str(free_port()), "--"]
    process = subprocess.Popen(
        [*command, *COMMAND, "--port", str(port), *flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with _serving(process, port) as server:
            yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()


def rank_environments(ranks: int, folder: Path) -> list[dict[str, str]]:
    """The environments of processes that are ranks of this machine: what `mlx.launch` sets for each."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
    return [{**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(ranks)]


@contextmanager
def started(flags: Sequence[str], folder: Path, ranks: int = 2) -> Iterator[tuple[Server, Processes]]:
    """Each rank is a process of this one, with what `mlx.launch` sets for it. At the end rank 0 stops the others."""
    port = free_port()
    processes = [
        subprocess.Popen([*COMMAND, "--port", str(port), *flags], stderr=subprocess.PIPE, text=True, env=environment)
        for environment in rank_environments(ranks, folder)
    ]
    try:
        with _serving(processes[0], port) as server:
            yield server, processes
    finally:
        processes[0].terminate()
        with suppress(subprocess.TimeoutExpired):
            processes[0].communicate(timeout=STOP_S)
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def _serving(process: subprocess.Popen[str], port: int) -> Iterator[Server]:
    """The server that the process starts, from its banner on."""
    killer = threading.Timer(START_S, process.kill)
    killer.start()
    assert process.stderr is not None
    ready = any("base URL" in line for line in process.stderr)
    killer.cancel()
    assert ready, f"the server ended with {process.wait()}"
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=120) as http:
        yield Server(url, http, process)
