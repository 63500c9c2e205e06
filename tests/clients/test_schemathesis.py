"""schemathesis over every route of a server that may be spoilt: no 5xx, nothing that the document does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.running import tool
from clients.schemathesis_run import PACKAGE, command, passes
from main_job.serving import Server, start, stop
from tiny import save_tiny

pytestmark = pytest.mark.timeout(3600)

COUNTS = re.compile(r"Selected: (\d+)/(\d+)\n\s+Tested: (\d+)\n")
UNTRIED = 1
"""The stream of training events, which does not end."""
CONTEXT, EXAMPLES = 256, 50


@pytest.fixture
def disposable(tmp_path: Path) -> Iterator[Server]:
    """A server of a tiny model with a short context, so that whatever is asked for ends soon."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_tiny("llama", tmp_path / "model", max_position_embeddings=CONTEXT, **shape)
    (tmp_path / "adapters").mkdir()
    folders = ("--adapter-dir", str(tmp_path / "adapters"), "--checkpoint-dir", str(tmp_path / "checkpoints"))
    running = start("--enable-rl-training", "--model-path", str(tmp_path / "model"), *folders)
    yield running
    stop(running)


def test_every_route(disposable: Server) -> None:
    tested = 0
    for options in passes():
        said = tool(PACKAGE, "schemathesis", *command(disposable.url, options, seed=1, examples=EXAMPLES))
        counts = COUNTS.search(said)
        assert counts is not None, said
        selected, every, tried = map(int, counts.groups())
        assert tried == selected, said
        assert "Failures:" not in said, said
        tested += tried
    assert tested == every - UNTRIED
    assert disposable.get("/health") == {"status": "ok"}
