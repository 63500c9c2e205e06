"""The view Cluster: of a head, of a node that cannot serve a version, without NATS, and of a server that is no node."""

from __future__ import annotations

from typing import Any

from pages import LOOKS, Opened, chromium, opened
from playwright.sync_api import expect

NODES, VERSIONS = "Nodes of the cluster", "Shared adapter versions"


def looks(url: str, pictures: str, nodes: int) -> dict[str, Any]:
    """Every look of the view of the head, which has so many nodes."""
    seen = {}
    with chromium() as browser:
        for look in LOOKS:
            with opened(browser, f"{url}/dashboard", look) as shown:
                page = shown.page
                page.get_by_role("link", name="Cluster").click()
                expect(_rows(shown, NODES)).to_have_count(nodes)
                expect(page.get_by_text("ready", exact=True)).to_have_count(nodes)
                page.screenshot(path=f"{pictures}/cluster-{look}.png", full_page=True)
                seen[look] = {
                    "faults": shown.axe(),
                    "errors": shown.errors,
                    "sideways": page.evaluate("document.documentElement.scrollWidth > innerWidth"),
                    "kilobytes": shown.kilobytes(),
                    "figures": _figures(shown),
                    "nodes": _rows(shown, NODES).all_inner_texts(),
                    "versions": _rows(shown, VERSIONS).all_inner_texts(),
                }
    return seen


def unusable(url: str, pictures: str) -> dict[str, Any]:
    """A node that cannot serve a version."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/cluster") as shown:
        reasons = shown.page.locator(".reasons")
        expect(reasons).to_be_visible()
        shown.page.screenshot(path=f"{pictures}/cluster-unusable.png", full_page=True)
        return {
            "reasons": reasons.inner_text(),
            "figures": _figures(shown),
            "faults": shown.axe(),
            "errors": shown.errors,
        }


def cut_off(url: str, pictures: str) -> dict[str, Any]:
    """A node without a connection to NATS."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/cluster") as shown:
        expect(shown.page.get_by_role("alert")).to_be_visible()
        shown.page.screenshot(path=f"{pictures}/cluster-cut-off.png", full_page=True)
        said = shown.page.get_by_role("alert").inner_text()
        figures = _figures(shown)
        ready, lost = figures["Nodes ready"], figures["Nodes lost"]
        return {"said": said, "ready": ready, "lost": lost, "faults": shown.axe(), "errors": shown.errors}


def off(url: str, pictures: str) -> dict[str, Any]:
    """A server that is no node: the navigation does not have the view, and its address says how to start a cluster."""
    with chromium() as browser, opened(browser, f"{url}/dashboard") as shown:
        page = shown.page
        page.get_by_text("Serving").wait_for()
        listed = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
        page.goto(f"{url}/dashboard#/cluster")
        command = page.locator(".command code").inner_text()
        page.screenshot(path=f"{pictures}/cluster-off.png", full_page=True)
        return {"listed": listed, "command": command, "faults": shown.axe(), "errors": shown.errors}


def _rows(shown: Opened, table: str) -> Any:
    return shown.page.get_by_role("table", name=table).locator("tbody tr")


def _figures(shown: Opened) -> dict[str, str]:
    """The large figures, by their names."""
    figures = shown.page.locator(".figure")
    return dict(zip(figures.locator("dt").all_inner_texts(), figures.locator("strong").all_inner_texts(), strict=True))
