"""Follows the pages as a reader does: in one folder, each command as it is written.

Commands run in bash, with three changes. `uv run` takes programs of the environment that runs the tests. The server
of the pages, http://127.0.0.1:8000, is on a free port. And curl fails where the server answers with an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import httpx
from docs.pages import ROOT, Block, blocks_of

from mlx_parallm.cli.flags import settings
from mlx_parallm.cli.main import serve_parser
from mlx_parallm.config import resolve
from mlx_parallm.errors import ConfigError

START_S, STOP_S, LIMIT_S, SLOW_LIMIT_S = 200, 60, 400, 1200
ADDRESS = "127.0.0.1:8000"
PLAIN = "uv run mlx_parallm_serve"
"""What runs before a page starts a server itself."""
EVERYTHING = (
    "uv run mlx_parallm_serve --adapter-dir adapters --checkpoint-dir runs/pages --enable-rl-training "
    "--learning-rate 1e-12 --update-frequency 32 --atropos-api"
)
"""A server that answers the commands of every page. It learns so little that what one page teaches changes no answer of
another, in whatever order they run."""

_SERVES = re.compile(
    r"(?:pip install uv && )?((?:\w+=\S+ )*uv run (?:--extra \w+ )*mlx_parallm_serve(?!.* --(?:print-config|help)).*)"
)
_ASKS_SERVER = re.compile(
    r"uv run mlx_parallm (?:ps|usage|chat|bench|training \w+"
    r"|adapters (?:list|load|unload|rollback|route|save|delete))\b"
)
_UV = """#!/bin/sh
# `uv run [--group NAME] PROGRAM` and `uv pip install --editable FOLDER`
if [ "$1" = pip ]; then exec "$PAGES_BIN/python" "$PAGES_INSTALL" "$4"; fi
shift
while [ "${1#--}" != "$1" ]; do shift 2; done
program=$1
shift
exec "$PAGES_BIN/$program" "$@"
"""
_CURLRC = "fail-with-body\nsilent\nshow-error\nmax-time = 300\n"


def _heed_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and so the tests, and so all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class PageError(AssertionError):
    """A block did not do what its page says."""


class Reader:
    """`shared`: one server answers the commands of all pages, and a line that starts another one is only checked.
    Otherwise each such line starts its server, and slow blocks run too. `variables`: of the environment."""

    def __init__(self, folder: Path, shared: bool, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._folder = folder
        self._shared = shared
        self._line = ""
        self._server: subprocess.Popen[str] | None = None
        self._printed: str | None = ""
        """What the last block printed; None: it was not run."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        tools = folder / "tools"
        tools.mkdir()
        (tools / "uv").write_text(_UV)
        (tools / "uv").chmod(0o755)
        (tools / ".curlrc").write_text(_CURLRC)
        for name in ("examples", "server_config.yaml"):
            (folder / name).symlink_to(ROOT / name)
        self._environment = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "CURL_HOME": str(tools),
            "PAGES_BIN": str(Path(sys.executable).parent),
            "PAGES_INSTALL": str(Path(__file__).with_name("install_editable.py")),
            "PYTHONPATH": str(folder / "site"),
            **variables,
        }
        if shared:
            subprocess.run([sys.executable, "examples/random_adapter.py", "adapters/tone"], cwd=folder, check=True)

    def follow(self, page: str) -> None:
        """Runs what the page shows, from top to bottom.

        Raises:
            PageError: a command fails, or the page shows another output.
        """
        self._serve(EVERYTHING if self._shared else PLAIN)
        for block in blocks_of(page):
            if block.title:
                self._save(block)
            elif block.note == "output":
                self._compare(block)
            elif block.note == "not run" or (block.note == "slow" and self._shared):
                self._printed = None
            elif block.language == "sh":
                self._run_sh(block)
            elif block.language == "python":
                self._run(block, sys.executable, "-c", self._here(block.text))

    @property
    def url(self) -> str:
        """Where servers of the pages listen."""
        return f"http://{self._address}"

    def get(self, path: str) -> httpx.Response:
        """What the server of the pages answers, which is started if it does not run."""
        self._serve(EVERYTHING if self._shared else PLAIN)
        return httpx.get(f"{self.url}{path}", timeout=LIMIT_S).raise_for_status()

    def close(self) -> None:
        """Ends the server; it must end with 0."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            try:
                assert self._server.wait(STOP_S) == 0
            finally:
                self._server.kill()
                self._server = None

    def _here(self, text: str) -> str:
        asked = _ASKS_SERVER.sub(rf"\g<0> --url http://{ADDRESS}", text)
        return asked.replace(ADDRESS, self._address).replace("port=8000", "port=0")

    def _save(self, block: Block) -> None:
        file = self._folder / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._here(block.text))

    def _compare(self, block: Block) -> None:
        for line in block.text.splitlines():
            if self._printed is not None and line not in self._printed:
                raise PageError(f"{block}: {line!r} is not in the output:\n{self._printed}")

    def run(self, block: Block, changes: Mapping[str, str]) -> None:
        """Runs a block of commands, whatever its note says, with these texts changed in it."""
        for old, new in changes.items():
            block = replace(block, text=block.text.replace(old, new))
        self._run_sh(block)

    def _run_sh(self, block: Block) -> None:
        script = ""
        for line in block.text.replace("\\\n", "").splitlines():
            if starts := _SERVES.fullmatch(line):
                self._run_script(block, script)
                script = ""
                self._serve(starts[1])
            else:
                script += f"{line}\n"
        self._run_script(block, script)

    def _run_script(self, block: Block, script: str) -> None:
        if script.strip():
            self._run(block, "bash", "-euo", "pipefail", "-c", self._here(script))

    def _run(self, block: Block, *command: str) -> None:
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_ctrl_c,
        )
        try:
            if block.stopped_after_s is not None:
                self._interrupt(block, process, block.stopped_after_s)
            else:
                self._printed, _ = process.communicate(timeout=LIMIT_S if self._shared else SLOW_LIMIT_S)
                if process.returncode:
                    raise PageError(f"{block} ended with {process.returncode}:\n{self._printed}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _interrupt(self, block: Block, process: subprocess.Popen[str], after_s: float) -> None:
        time.sleep(after_s)
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGINT)
        self._printed, _ = process.communicate(timeout=STOP_S)
        if ended:
            raise PageError(f"{block} ended by itself with {process.returncode}:\n{self._printed}")

    def _serve(self, line: str) -> None:
        """Has the server of `line` running; the one that runs is stopped if it is another one's."""
        if self._shared and line != EVERYTHING:
            words = shlex.split(line)
            program = words.index("mlx_parallm_serve")
            self._check_flags(words[: program - 2], words[program:])
        elif line != self._line or self._server is None:
            self.close()
            self._start(line)
            self._line = line

    def _check_flags(self, variables: list[str], command: list[str]) -> None:
        """Resolves the configuration that the line would start a server with."""
        environment = self._environment | dict(variable.split("=", 1) for variable in variables)
        try:
            with contextlib.chdir(self._folder):
                args = serve_parser().parse_args(command[1:])
                resolve(settings(args), environment, args.config)
        except ConfigError as error:
            raise PageError(f"{command} is refused:\n{error}") from error

    def _start(self, line: str) -> None:
        self._server = server = subprocess.Popen(
            ["bash", "-c", f"exec env {line} --port {self._address.rpartition(':')[2]}"],
            cwd=self._folder,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        killer = threading.Timer(START_S, server.kill)
        killer.start()
        assert server.stderr is not None
        printed = []
        for text in server.stderr:
            printed.append(text)
            if "base URL" in text:
                break
        killer.cancel()
        if "base URL" not in printed[-1]:
            self._server = None
            raise PageError(f"{line} ended with {server.wait()}:\n{''.join(printed)}")
        threading.Thread(target=server.stderr.read, daemon=True).start()
