"""The view Now, while a client streams; the login; a lost connection."""

from __future__ import annotations

import time
from typing import Any

from pages import Opened, chromium, every_look, logged_in, opened
from playwright.sync_api import expect

GENERATED = "dl.figures > div:first-child strong"
BANNER = "The server does not answer"


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view, with its first paint."""

    def use(shown: Opened) -> dict[str, Any]:
        page = shown.page
        expect(page.locator(GENERATED)).not_to_have_text("0")
        return {
            "kilobytes": shown.kilobytes(),
            "first_paint_s": shown.first_paint_s(),
            "parts": page.get_by_role("heading", level=2).all_inner_texts(),
            "chart": page.locator("figcaption").first.inner_text(),
            "device": page.locator(".strip svg").get_attribute("aria-label"),
            "memory": page.locator(".bar").get_attribute("aria-label"),
        }

    return every_look(f"{url}/", f"{pictures}/now", use)


def lost(url: str, pictures: str) -> dict[str, Any]:
    """The connection breaks, and comes back."""
    with chromium() as browser, opened(browser, f"{url}/") as shown:
        expect(shown.page.locator(GENERATED)).to_be_visible()
        shown.page.context.set_offline(True)
        expect(shown.page.get_by_role("alert")).to_contain_text(BANNER)
        shown.page.screenshot(path=f"{pictures}/now-lost.png")
        faults = shown.axe()
        shown.page.context.set_offline(False)
        since = time.monotonic()
        expect(shown.page.get_by_role("alert")).to_have_count(0)
        return {"back_after_s": time.monotonic() - since, "faults": faults}


def login(url: str, key: str, pictures: str) -> dict[str, Any]:
    """Somebody logs in with a key that may not pause the server, and out again."""
    with chromium() as browser, opened(browser, f"{url}/") as shown:
        page = shown.page
        asked = page.url
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Open").click()
        expect(page.locator(GENERATED)).to_be_visible()
        pause = page.get_by_role("button", name="Pause…")
        seen = {
            "asked": asked,
            "caller": page.locator(".caller span").inner_text(),
            "pause_enabled": pause.is_enabled(),
            "why": page.locator(".action small").inner_text(),
            "faults": shown.axe(),
            "errors": [*shown.errors],
        }
        page.screenshot(path=f"{pictures}/now-role.png")
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key").wait_for()
        return {**seen, "left_to": page.url}


def pause(url: str, key: str, pictures: str) -> dict[str, Any]:
    """An admin pauses the server by keyboard, and resumes it; then the key is taken away."""
    with chromium() as browser, logged_in(browser, url, key) as shown:
        page = shown.page
        page.get_by_role("button", name="Pause…").focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Pause the server?")
        dialog.wait_for()
        faults = shown.axe()
        page.screenshot(path=f"{pictures}/now-pause.png")
        dialog.get_by_role("button", name="Pause").press("Enter")
        expect(page.locator(".state")).to_contain_text("Paused")
        told = page.get_by_role("status").inner_text()
        page.get_by_role("button", name="Resume").press("Enter")
        expect(page.locator(".state")).to_contain_text("Serving")
        return {"told": told, "faults": faults, "errors": shown.errors}
