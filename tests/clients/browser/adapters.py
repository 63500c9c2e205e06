"""The view Adapters, of a server that trains: its looks, and each action by its dialog."""

from __future__ import annotations

from typing import Any

from pages import Opened, every_look
from playwright.sync_api import expect

VERSIONS = "Versions of all adapters"


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view with a version opened."""

    def use(shown: Opened) -> dict[str, Any]:
        versions = shown.page.get_by_role("table", name=VERSIONS)
        versions.get_by_role("button").first.click()
        expect(shown.page.get_by_text("Rank and size")).to_be_visible()
        return {"route": shown.page.locator(".bar").first.get_attribute("aria-label")}

    return every_look(f"{url}/dashboard#/adapters", f"{pictures}/adapters", use)
