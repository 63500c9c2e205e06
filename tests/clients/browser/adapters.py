"""The view Adapters, of a server that trains: its looks, and each action by its dialog."""

from __future__ import annotations

from typing import Any

from pages import LOOKS, chromium, opened
from playwright.sync_api import expect

VERSIONS = "Versions of all adapters"


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view with a version opened, with its faults and errors."""
    seen = {}
    with chromium() as browser:
        for look in LOOKS:
            with opened(browser, f"{url}/dashboard#/adapters", look) as shown:
                page = shown.page
                versions = page.get_by_role("table", name=VERSIONS)
                versions.get_by_role("button").first.click()
                expect(page.get_by_text("Rank and size")).to_be_visible()
                page.screenshot(path=f"{pictures}/adapters-{look}.png", full_page=True)
                seen[look] = {
                    "faults": shown.axe(),
                    "errors": shown.errors,
                    "sideways": page.evaluate("document.documentElement.scrollWidth > innerWidth"),
                    "versions": versions.get_by_role("button").all_inner_texts(),
                    "route": page.locator(".bar").first.get_attribute("aria-label"),
                }
    return seen
