"""The dashboard, open for ten minutes of live traffic and training."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.dashboards import browse, learning_server, needs_chromium, needs_npm, traffic
from clients.running import Report

MINUTES, MOST_GROWN_MB = 10, 30.0

pytestmark = [pytest.mark.large("it takes ten minutes"), needs_npm, needs_chromium]


@pytest.mark.timeout(1500)
def test_ten_minutes_without_an_error_of_the_console(tmp_path: Path, pictures: Path, report: Report) -> None:
    with learning_server(tmp_path) as server:
        before = server.get("/v1/training/status")["updates_total"]
        with traffic(server):
            seen = browse("long.stays_open", server.url, pictures, minutes=MINUTES)
        made = server.get("/v1/training/status")["updates_total"] - before
    report("updates while the page was open", made)
    report("growth of the page's heap in ten minutes", seen["heap_grown_mb"], "MB", MOST_GROWN_MB)
    assert seen["alerts"] == []
    assert seen["rounds"] > 1
    assert made > 0
    assert seen["heap_grown_mb"] < MOST_GROWN_MB
