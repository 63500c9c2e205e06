"""The pictures of the dashboard in `docs/images` can be taken, of real servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.dashboards import browse, learning_server, needs_chromium, needs_npm, traffic
from main_job.serving import start, stop

MOST_BYTES = 100_000
LEARNING = ("now", "learning", "trajectories", "adapters", "playground")

pytestmark = [pytest.mark.timeout(900), needs_npm, needs_chromium]


def test_of_a_server_that_learns(tmp_path: Path, pictures: Path) -> None:
    with learning_server(tmp_path) as server, traffic(server):
        assert browse("pictures.take", server.url, pictures, views=" ".join(LEARNING)) == []
    assert_small(pictures, *LEARNING)


def test_of_the_form_of_a_lesson(tmp_path: Path, pictures: Path) -> None:
    """A server that draws tasks of its own, as the other one, takes no lesson."""
    server = start("--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
    try:
        assert browse("pictures.take", server.url, pictures, views="teach") == []
    finally:
        stop(server)
    assert_small(pictures, "teach")


def assert_small(pictures: Path, *names: str) -> None:
    sizes = {name: (pictures / f"{name}.webp").stat().st_size for name in names}
    assert all(0 < size < MOST_BYTES for size in sizes.values()), sizes
