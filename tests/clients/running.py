"""Runs clients as their users do, each in an environment of its own that uv keeps in its cache."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from main_job.serving import Server

HERE = Path(__file__).parent
SCRIPTS, NODE = HERE / "scripts", HERE / "node"
EXAMPLES = HERE.parents[1] / "examples" / "protocols"
LIMIT_S, IDLE_S = 1800, 10
UV = ("uv", "--quiet")
PYTHON = ("--python", sys.executable)
ENVIRONMENT = {
    "OPENAI_API_KEY": "none",
    "NO_PROXY": "127.0.0.1",
    "NO_COLOR": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Nobody asks a hub, and nobody looks for prices."""

Report = Callable[..., None]
"""The fixture `report(name, value, unit="", limit=None, at_least=False)`: one figure of `benchmarks.lib.figures`."""


def printed(*command: str, at: Path = SCRIPTS, **variables: str) -> str:
    """What `command`, run in the folder `at`, wrote to standard output; it must end with 0."""
    done = subprocess.run(
        command, cwd=at, env=os.environ | ENVIRONMENT | variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{command[:6]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(package: str, *command: str, **variables: str) -> str:
    """What a command of `package` (a requirement; more after a space) printed."""
    first, *more = package.split()
    extra = [part for requirement in more for part in ("--with", requirement)]
    return printed(*UV, "tool", "run", *PYTHON, "--from", first, *extra, *command, **variables)


def script(name: str, url: str, asked: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """The answers that a script of `scripts/` or `node/` printed, by part, on its last line."""
    python = (*UV, "run", *PYTHON, "--script", str(SCRIPTS / name))
    command = python if name.endswith(".py") else ("node", str(NODE / name))
    last = printed(*command, f"{url}/v1", json.dumps(asked), *parts).splitlines()[-1]
    answers: dict[str, Any] = json.loads(last)
    return answers


def install_node(folder: Path = NODE) -> None:
    """Installs what `package.json` in the folder names."""
    printed("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", at=folder)


@contextmanager
def asking_no_other_host() -> Iterator[dict[str, str]]:
    """The variables that send a program's requests for other hosts to a proxy here. Fails if one has come while the
    block ran."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        elsewhere = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        yield {"HTTP_PROXY": elsewhere, "HTTPS_PROXY": elsewhere, "NO_PROXY": "127.0.0.1"}
        with pytest.raises(BlockingIOError):  # nobody has connected
            proxy.accept()


def wait_until_idle(server: Server) -> None:
    """Fails if the server still holds something of a request some seconds after the last one.

    A row that has answered is gone only when the device has finished the step after its last token.
    """
    until = time.monotonic() + IDLE_S
    while True:
        state = server.get("/debug/state")["engine"]
        left = (state["alive"], state["running"], state["waiting"], state["kv_bytes_held"])
        if left == (True, 0, 0, 0):
            return
        assert time.monotonic() < until, f"alive, running, waiting and KV bytes: {left}"
        time.sleep(0.1)
