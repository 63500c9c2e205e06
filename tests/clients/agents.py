"""What the tests of coding agents share: an agent is installed and run, its folder made, a long context served."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clients.running import HERE, asking_no_other_host, install_node
from main_job.serving import Server, start, stop
from tiny import save_tiny

LIMIT_S = 900
GREETING = "greeting.txt"


def installed(folder: str, command: str) -> str:
    """The path of a command of the package that `package.json` in this folder names. npm installs it here."""
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    install_node(HERE / folder)
    return str(HERE / folder / "node_modules" / ".bin" / command)


def work_folder(parent: Path) -> Path:
    """The folder that an agent works in, with the file that it is asked to edit."""
    made = parent / "work"
    made.mkdir()
    (made / GREETING).write_text("Hallo, world!\n")
    return made


@contextmanager
def serving_long_context(folder: Path, *flags: str) -> Iterator[Server]:
    """A server of a tiny random model whose context has 65,536 tokens, each of them a byte."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_tiny("llama", folder / "tiny", max_position_embeddings=65536, **shape)
    running = start("--model-path", str(folder / "tiny"), *flags)
    yield running
    stop(running)


def run_agent(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs an agent in its folder, whose parent is its home. It may connect to no host but this one."""
    with asking_no_other_host() as proxied:
        return subprocess.run(
            command,
            cwd=folder,
            env=os.environ | proxied | {"HOME": str(folder.parent)} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
