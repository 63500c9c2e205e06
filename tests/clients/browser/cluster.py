"""The view Cluster: of a head, of a node that cannot serve a version, and without NATS."""

from __future__ import annotations

from typing import Any

from pages import Opened, chromium, every_look, opened
from playwright.sync_api import expect

NODES = "Nodes of the cluster"
TABLES = {"nodes": NODES, "versions": "Shared adapter versions"}


def looks(url: str, pictures: str, nodes: int) -> dict[str, Any]:
    """Every look of the view of the head, which has so many nodes."""

    def use(shown: Opened) -> dict[str, Any]:
        shown.page.get_by_role("link", name="Cluster").click()
        expect(_rows(shown, NODES)).to_have_count(nodes)
        expect(shown.page.get_by_text("ready", exact=True)).to_have_count(nodes)
        tables = {name: _rows(shown, table).all_inner_texts() for name, table in TABLES.items()}
        return {"figures": _figures(shown), "kilobytes": shown.kilobytes(), **tables}

    return every_look(f"{url}/dashboard", f"{pictures}/cluster", use)


def unusable(url: str, pictures: str) -> dict[str, Any]:
    """A node that cannot serve a version."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/cluster") as shown:
        reasons = shown.page.locator(".reasons")
        expect(reasons).to_be_visible()
        shown.page.screenshot(path=f"{pictures}/cluster-unusable.png", full_page=True)
        return {"reasons": reasons.inner_text(), "figures": _figures(shown), **shown.state()}


def cut_off(url: str, pictures: str) -> dict[str, Any]:
    """A node without a connection to NATS."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/cluster") as shown:
        expect(shown.page.get_by_role("alert")).to_be_visible()
        shown.page.screenshot(path=f"{pictures}/cluster-cut-off.png", full_page=True)
        return {"said": shown.page.get_by_role("alert").inner_text(), "figures": _figures(shown), **shown.state()}


def _rows(shown: Opened, table: str) -> Any:
    return shown.page.get_by_role("table", name=table).locator("tbody tr")


def _figures(shown: Opened) -> dict[str, str]:
    """The large figures, by their names."""
    figures = shown.page.locator(".figure")
    return dict(zip(figures.locator("dt").all_inner_texts(), figures.locator("strong").all_inner_texts(), strict=True))
