"""The view Learning while an adapter is trained, and for roles that may do less."""

from __future__ import annotations

from typing import Any

from pages import Opened, chromium, every_look, logged_in, opened
from playwright.sync_api import Locator, Page, expect

VERSIONS = "Versions of the adapter"
UPDATE_MS = 180_000


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view."""

    def use(shown: Opened) -> dict[str, Any]:
        expect(shown.page.get_by_role("table", name=VERSIONS)).to_be_visible()
        charts = shown.page.locator("figcaption").all_inner_texts()
        return {"charts": charts, "lineage": _lineage(shown.page), "kilobytes": shown.kilobytes()}

    return every_look(f"{url}/dashboard#/learning", f"{pictures}/learning", use)


def steers(url: str, pictures: str) -> dict[str, Any]:
    """From the page alone: an update comes in live, two versions are saved, the older one goes live again, and the
    newer one competes with it."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/learning") as shown:
        page = shown.page
        first = figure(page, "Updates")
        expect(figure_of(page, "Updates")).not_to_have_text(first, timeout=UPDATE_MS)
        older = saved(page)
        before = figure(page, "Updates")
        confirm(page, "Resume updates", asks=False)
        expect(figure_of(page, "Updates")).not_to_have_text(before, timeout=UPDATE_MS)
        newer = saved(page)
        confirm(page, f"Roll back to {older}")
        expect(page.get_by_role("row", name=newer).locator(".rolled-back")).to_be_visible(timeout=UPDATE_MS)
        expect(figure_of(page, "Live version")).to_have_text(older, timeout=UPDATE_MS)
        page.screenshot(path=f"{pictures}/learning-rolled-back.png", full_page=True)
        seen = {
            "states": page.get_by_role("row", name=newer).first.inner_text(),
            "moments": page.get_by_role("table", name="Events of the training").inner_text(),
            "lineage": _lineage(page),
            "faults": shown.axe(),
        }
        page.goto(f"{url}/dashboard#/adapters/{newer.replace('@', '%40')}")
        confirm(page, "Compare")
        expect(page.get_by_text(f"{newer} is being compared")).to_be_visible(timeout=UPDATE_MS)
        page.screenshot(path=f"{pictures}/adapters-compared.png", full_page=True)
        confirm(page, "End the comparison")
        expect(page.get_by_text(f"{newer} was stopped")).to_be_visible(timeout=UPDATE_MS)
        return {**seen, "errors": shown.errors, "compared_faults": shown.axe()}


def saved(page: Page) -> str:
    """Pauses updates, saves the live version in the view Adapters, and comes back. Returns the version."""
    confirm(page, "Pause updates")
    expect(page.get_by_text("Paused", exact=True)).to_be_visible(timeout=UPDATE_MS)
    page.get_by_role("link", name="Adapters").click()
    live = page.get_by_role("table", name="Versions of all adapters").locator("tr", has=page.locator(".tag.live"))
    version = live.get_by_role("button").inner_text()
    live.get_by_role("button").click()
    confirm(page, "Save")
    expect(page.get_by_role("table", name="Checkpoints").get_by_text(version, exact=True).first).to_be_visible(
        timeout=UPDATE_MS
    )
    page.get_by_role("link", name="Learning").click()
    return version


def confirm(page: Page, label: str, asks: bool = True) -> None:
    """Presses a button, and the same one in the dialog that asks."""
    page.get_by_role("button", name=label, exact=True).first.click()
    if asks:
        page.get_by_role("dialog").get_by_role("button", name=label, exact=True).click()


def figure_of(page: Page, label: str) -> Locator:
    return page.locator(".figure", has=page.get_by_text(label, exact=True)).locator("strong")


def figure(page: Page, label: str) -> str:
    return figure_of(page, label).inner_text()


def _lineage(page: Page) -> str | None:
    return page.locator(".tree svg").get_attribute("aria-label")


def roles(url: str, key: str, pictures: str) -> dict[str, Any]:
    """What a key sees of both views: sentences in place of what its role may not see, and buttons that are off."""
    with chromium() as browser, logged_in(browser, url, key) as shown:
        page = shown.page
        listed = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
        page.goto(f"{url}/dashboard#/learning")
        why = page.locator("p.empty").or_(page.locator(".action small").first).first
        expect(why).not_to_have_text("Asking the server…")
        refused = why.inner_text()
        page.get_by_role("link", name="Adapters").click()
        load = page.get_by_role("button", name="Load an adapter…")
        expect(load).to_be_visible()
        page.screenshot(path=f"{pictures}/adapters-role.png", full_page=True)
        return {
            "refused": refused,
            "listed": listed,
            "may_load": load.is_enabled(),
            "why": page.locator(".action small").all_inner_texts()[:1],
            **shown.state(),
        }
