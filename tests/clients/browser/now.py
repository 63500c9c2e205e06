"""The view Now, while a client streams; the login; a lost connection."""

from __future__ import annotations

import time
from typing import Any

from pages import LOOKS, chromium, opened
from playwright.sync_api import expect

GENERATED = "dl.figures > div:first-child strong"
BANNER = "The server does not answer"


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view, with its faults, errors, size and first paint."""
    seen = {}
    with chromium() as browser:
        for look in LOOKS:
            with opened(browser, f"{url}/", look) as shown:
                expect(shown.page.locator(GENERATED)).not_to_have_text("0")
                shown.page.screenshot(path=f"{pictures}/now-{look}.png", full_page=True)
                seen[look] = {
                    "faults": shown.axe(),
                    "errors": shown.errors,
                    "kilobytes": shown.kilobytes(),
                    "first_paint_s": shown.first_paint_s(),
                    "sideways": shown.page.evaluate("document.documentElement.scrollWidth > innerWidth"),
                    "parts": shown.page.get_by_role("heading", level=2).all_inner_texts(),
                    "chart": shown.page.locator("figcaption").first.inner_text(),
                    "device": shown.page.locator(".strip svg").get_attribute("aria-label"),
                    "memory": shown.page.locator(".bar").get_attribute("aria-label"),
                }
    return seen


def idle(url: str, pictures: str) -> dict[str, Any]:
    """The view of a server that nobody has asked for anything."""
    with chromium() as browser, opened(browser, f"{url}/dashboard") as shown:
        command = shown.page.locator(".command code").inner_text()
        shown.page.screenshot(path=f"{pictures}/now-idle.png", full_page=True)
        return {"command": command, "faults": shown.axe(), "errors": shown.errors}


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
            "errors": list(shown.errors),
        }
        page.screenshot(path=f"{pictures}/now-role.png")
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key").wait_for()
        return {**seen, "left_to": page.url}


def pause(url: str, key: str, pictures: str) -> dict[str, Any]:
    """An admin pauses the server by keyboard, and resumes it; then the key is taken away."""
    with chromium() as browser, opened(browser, f"{url}/login?next=/dashboard") as shown:
        page = shown.page
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
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
