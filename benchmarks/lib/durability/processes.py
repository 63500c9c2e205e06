"""Starts the two commands that train, ends them by a signal, and installs the environment that they train on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

STOPPED_S = 60
"""Longest time for a process to end after its signal."""

COMMON = ("--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "1e-3", "--log-level", "error")
_NO_ROLLBACK = {"MLX_PARALLM_RL_TRAINING__DIVERGENCE__REWARD__LIMIT": "1000"}
"""Rewards are random. A rollback, which drops what the versions after it drew, would count as lost here."""

PACKAGE = """
from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task

class Letters:
    def tasks(self, seed):
        number = 0
        while True:
            number += 1
            message = {"role": "user", "content": f"Say a word. {number}"}
            yield Task((message,), CollectionSpec("regex", {"pattern": "(?s)^(..)*$"}))
"""


def start(command: str, run: Path, site: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A process of `mlx_parallm_serve` or `mlx_parallm_train` on the run in `run / "kept"`. It heeds SIGINT, which a
    shell lets its background jobs, and what they start, ignore."""
    heed = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from mlx_parallm.cli.main import {command}; sys.exit({command}())"
    argv = [sys.executable, "-c", code, *COMMON, "--checkpoint-dir", str(run / "kept"), *flags]
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, **_NO_ROLLBACK, "PYTHONPATH": path}
    with (run / "output.txt").open("ab") as output:
        return subprocess.Popen(argv, stdout=output, stderr=output, env=environment)


def end(process: subprocess.Popen[bytes], chosen: signal.Signals, after: float) -> tuple[int, float]:
    """Sends the signal `after` seconds from now. Returns the exit code and the seconds that the process took to end."""
    time.sleep(after)
    began = time.monotonic()
    process.send_signal(chosen)
    try:
        return process.wait(STOPPED_S), time.monotonic() - began
    finally:
        process.kill()


def small_model(folder: Path) -> Path:
    """Writes a random model of two narrow layers, for runs in which it does not matter what is computed."""
    subprocess.run([sys.executable, "-m", "benchmarks.lib.programs.small_model", str(folder)], check=True)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def post(url: str, body: object) -> Any:
    """The decoded answer. Raises OSError (HTTPError among them) or ValueError."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=STOPPED_S) as answer:
        return json.loads(answer.read())


def get(url: str) -> Any:
    """The decoded answer. Raises OSError or ValueError."""
    with urllib.request.urlopen(url, timeout=STOPPED_S) as answer:
        return json.loads(answer.read())


def install(site: Path) -> None:
    """Makes a package with the environment `letters`, which wants an even number of letters: any model has some."""
    (site / "durability_letters.py").write_text(PACKAGE)
    info = site / "durability_letters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: durability_letters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_parallm.environments]\nletters = durability_letters:Letters\n")
