"""The page stays open for minutes, from one view to the next, while clients stream and an adapter learns."""

from __future__ import annotations

import time
from typing import Any

from pages import chromium, opened
from playground import ask, limit
from playwright.sync_api import Page

STAY_MS = 5_000


def stays_open(url: str, pictures: str, minutes: float) -> dict[str, Any]:
    """Visits all views in turn, and chats in the Playground. Returns the console's errors, and what went wrong else."""
    with chromium() as browser, opened(browser, f"{url}/dashboard") as shown:
        page, rounds, heap = shown.page, 0, 0.0
        navigation = page.get_by_role("navigation", name="Views").get_by_role("link")
        navigation.first.wait_for()
        names = navigation.all_inner_texts()
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            for name in names:
                page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
                page.wait_for_timeout(STAY_MS)
                if name == "Playground":
                    limit(page, 8)
                    ask(page, "Name a fruit.")
            rounds += 1
            if rounds == 1:
                heap = heap_mb(page)
        page.screenshot(path=f"{pictures}/long.png", full_page=True)
        alerts = page.get_by_role("alert").all_inner_texts()
        grown = heap_mb(page) - heap
        return {"names": names, "rounds": rounds, "heap_grown_mb": grown, "alerts": alerts, "errors": shown.errors}


def heap_mb(page: Page) -> float:
    """The page's JavaScript objects in MB, after what is not used any more is gone."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6
