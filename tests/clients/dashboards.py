"""Servers for tests of the dashboard, and its browser: Debian's Chromium 150, driven by Playwright 1.65.2."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from clients.running import HERE, PYTHON, UV, printed
from main_job.serving import Server, start, stop
from server.keys import key_file

ROOT = HERE.parents[1]
SOURCES = ROOT / "dashboard"
WORDS = """
rl_training:
  enabled: true
  environment: words
  max_completion_tokens: 8
  update_frequency: 8
  optimizer:
    learning_rate: 0.0002
"""

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")


@cache
def install_packages() -> None:
    """Installs the packages of the dashboard: axe-core, and those that build it."""
    printed("npm", "ci", "--no-audit", "--no-fund", at=SOURCES)


def browse(scenario: str, url: str, pictures: Path, **arguments: str | float) -> dict[str, Any]:
    """What a scenario of `browser/` saw, in which nothing may be wrong."""
    install_packages()
    command = (*UV, "run", *PYTHON, "--script", str(HERE / "browser" / "run.py"), scenario)
    said = printed(*command, json.dumps({"url": url, "pictures": str(pictures), **arguments}))
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert [*wrong_in(seen)] == []
    return seen


def wrong_in(seen: object) -> Iterator[object]:
    """What must not be there: accessibility faults, errors of the console, and a page that is wider than its window."""
    if isinstance(seen, dict):
        for name, value in seen.items():
            found = value if name in ("faults", "compared_faults", "errors", "sideways") else [*wrong_in(value)]
            yield from [(name, found)] if found else []


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Three clients that stream without a pause while the block runs."""
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            for _ in server.stream("base", 100):
                if over.is_set():
                    return

    clients = [threading.Thread(target=keep_asking) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


@contextmanager
def keyed_server(folder: Path) -> Iterator[tuple[Server, dict[str, str], dict[str, dict[str, str]]]]:
    """A server that trains, with a key of each role and another of the role train; their secrets, and their headers."""
    file, sent = key_file(folder, reader="inference", teacher="train", other="train", boss="admin")
    secrets = {name: headers["authorization"].removeprefix("Bearer ") for name, headers in sent.items()}
    server = start("--keys-file", str(file), "--enable-rl-training", "--checkpoint-dir", str(folder / "run"))
    try:
        yield server, secrets, sent
    finally:
        stop(server)


@contextmanager
def learning_server(folder: Path, *flags: str) -> Iterator[Server]:
    """A server that trains an adapter on the environment `words` by itself, in small updates. Two are made."""
    (folder / "words.yaml").write_text(WORDS)
    server = start("--config", str(folder / "words.yaml"), "--checkpoint-dir", str(folder / "run"), *flags)
    try:
        while server.get("/v1/training/status")["updates_total"] < 2:
            time.sleep(1)
        yield server
    finally:
        stop(server)
