"""A server under good and hostile clients for half a minute, with a restart in the middle.

`benchmarks/soak.py` is the same for half an hour, and measures what grows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.lib.soak.good import controls
from benchmarks.lib.soak.serving import Server, prepare
from benchmarks.soak import soak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc"),
]


async def test_nothing_is_lost_or_wrong_or_left_behind(tmp_path: Path) -> None:
    server = Server(tmp_path, tmp_path / "run", prepare(tmp_path))
    try:
        await server.start()
        await server.fill_journal(1)  # from now on the adapter in training is served
        known = await controls(server.port, server.keys["good"])
        run = await soak(server, known, (0.25, 0.25), hostile=True)
    finally:
        server.kill()
    assert not [*run.faults()]
    assert not run.left_behind
    assert [code for code, _ in run.ends] == [0, 0]
    assert run.good.counts["publishes"] > 2
    assert run.hostile.counts["bad requests"] > 5
