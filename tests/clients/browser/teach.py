"""The view Teach: the first hour from the form to an adapter that answers differently, and what a role may not do."""

from __future__ import annotations

import re
import time
from typing import Any

from pages import Opened, chromium, every_look, logged_in, opened
from playwright.sync_api import Page, expect

LIMIT_S = 1500.0
ANSWERS_MS = 120_000
"""The base model and the adapter answer, which may wait for an update."""
RISEN = 20
"""Percent of the reward by which the curve must rise."""
SHARES = re.compile(r"(\d+(?:\.\d)?) %")


def first_hour(url: str, pictures: str) -> dict[str, Any]:
    """Somebody opens the page, starts the lesson that it suggests, sees the curve rise, and tries what was learnt."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/teach") as shown:
        page = shown.page
        start = page.get_by_role("button", name="Start", exact=True)
        start.wait_for()
        faults = shown.axe()
        page.screenshot(path=f"{pictures}/teach-form.png", full_page=True)
        start.click()
        page.get_by_role("button", name="Stop").wait_for()
        page.screenshot(path=f"{pictures}/teach-begun.png", full_page=True)
        seconds = _until_risen(page)
        first, last = _rewards(page)
        faults += shown.axe()
        page.screenshot(path=f"{pictures}/teach-risen.png", full_page=True)
        before, now = _answers(page, "Before"), _answers(page, "Now")
        _stop(page)
        page.get_by_role("button", name="Keep").click()
        page.get_by_role("button", name="Ask both").click()
        expect(page.locator(".answer")).to_have_count(2, timeout=ANSWERS_MS)
        tried = page.locator(".answer").all_inner_texts()
        told = page.locator(".toasts").inner_text()
        page.screenshot(path=f"{pictures}/teach-tried.png", full_page=True)
        page.get_by_role("button", name="Start over…").click()
        page.get_by_role("dialog").get_by_role("button", name="Undo").click()
        expect(page.locator(".toasts")).to_contain_text("as it was before", timeout=ANSWERS_MS)
        faults += shown.axe()
        rewards = {"first": first, "last": last, "seconds": seconds}
        said = {"before": before, "now": now, "tried": tried, "told": told}
        return {**rewards, **said, "faults": faults, "errors": shown.errors}


def ended(url: str, pictures: str) -> dict[str, Any]:
    """Every look of a lesson that has ended."""

    def use(shown: Opened) -> dict[str, Any]:
        shown.page.get_by_role("button", name="New lesson").wait_for()
        return {}

    return every_look(f"{url}/dashboard#/teach", f"{pictures}/teach", use)


def role(url: str, key: str, pictures: str) -> dict[str, Any]:
    """Somebody whose key may not teach."""
    with chromium() as browser, logged_in(browser, url, key) as shown:
        page = shown.page
        page.goto(f"{url}/dashboard#/teach")  # the navigation does not have it
        refused = page.locator(".empty", has_text="role")
        refused.wait_for()
        page.screenshot(path=f"{pictures}/teach-role.png")
        return {"said": refused.inner_text(), "faults": shown.axe()}


def _until_risen(page: Page) -> float:
    """Waits until the curve has risen, or the lesson has ended. Returns the seconds that it took."""
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        rewards = _rewards(page)
        if rewards[1] >= rewards[0] + RISEN or page.get_by_role("button", name="New lesson").is_visible():
            break
        page.wait_for_timeout(1000)
    return time.monotonic() - began


def _rewards(page: Page) -> tuple[float, float]:
    """The first and the newest reward, in percent."""
    shares = SHARES.findall(page.locator(".figure", has_text="Reward now").inner_text())
    return (float(shares[-1]), float(shares[0])) if len(shares) > 1 else (0.0, 0.0)


def _answers(page: Page, side: str) -> list[str]:
    return page.locator(".sides section", has_text=side).locator("li").all_inner_texts()


def _stop(page: Page) -> None:
    """Unless it has ended by itself, just now."""
    stop = page.get_by_role("button", name="Stop")
    if stop.is_visible():
        stop.click()
    page.get_by_role("button", name="New lesson").wait_for()
