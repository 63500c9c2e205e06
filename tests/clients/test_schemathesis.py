"""schemathesis over every route of a server that may be spoilt: no 5xx, nothing that the document does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.running import tool
from clients.schemathesis_run import HOOKS, PACKAGE, command, passes
from main_job.serving import Server, start, stop

pytestmark = pytest.mark.timeout(3600)

COUNTS = re.compile(r"Selected: (\d+)/(\d+)\n\s+Tested: (\d+)\n")
UNTRIED = 1
"""The stream of training events, which does not end."""


@pytest.fixture
def disposable(tmp_path: Path) -> Iterator[Server]:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    folders = ("--adapter-dir", str(adapters), "--checkpoint-dir", str(tmp_path / "checkpoints"))
    running = start("--enable-rl-training", *folders)
    yield running
    stop(running)


def test_every_route(disposable: Server) -> None:
    tested = 0
    for options in passes():
        said = tool(PACKAGE, "schemathesis", *command(disposable.url, options, seed=1), SCHEMATHESIS_HOOKS=str(HOOKS))
        counts = COUNTS.search(said)
        assert counts is not None, said
        selected, every, tried = map(int, counts.groups())
        assert tried == selected, said
        assert "Failures:" not in said, said
        tested += tried
    assert tested == every - UNTRIED
    assert disposable.get("/health") == {"status": "ok"}
