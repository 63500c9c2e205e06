"""The pictures of the dashboard in `docs/images` can be taken: of a real server that learns while it answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.dashboards import browse, learning_server, needs_chromium, needs_npm, traffic

MOST_BYTES = 100_000
NAMES = ("now", "learning", "trajectories", "adapters", "playground", "teach")

pytestmark = [pytest.mark.timeout(900), needs_npm, needs_chromium]


def test_they_are_taken_and_small(tmp_path: Path, pictures: Path) -> None:
    with learning_server(tmp_path) as server, traffic(server):
        assert browse("pictures.take", server.url, pictures) == []
    sizes = {name: (pictures / f"{name}.webp").stat().st_size for name in NAMES}
    assert all(0 < size < MOST_BYTES for size in sizes.values()), sizes
