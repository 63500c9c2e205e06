"""Opens the dashboard in headless Chromium, and collects what must not be there: errors and accessibility faults."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

AXE = Path(__file__).parents[3] / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS: dict[str, dict[str, Any]] = {
    f"{device}-{scheme}": {"color_scheme": scheme, **settings}
    for device, settings in {
        "desktop": {"viewport": {"width": 1280, "height": 900}},
        "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True},
    }.items()
    for scheme in ("light", "dark")
}
"""Every way in which a view is looked at."""
WAIT_MS = 30_000
WEBP_QUALITY = 50


@dataclass
class Opened:
    """A page, and the errors that its console has shown."""

    page: Page
    errors: list[str] = field(default_factory=list)

    def axe(self) -> list[str]:
        """The accessibility faults of what is shown, each with the elements that have it."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run()")["violations"]
        return [f"{fault['id']}: {[node['html'] for node in fault['nodes']]}" for fault in found]

    def state(self) -> dict[str, list[str]]:
        """What must not be there: accessibility faults, and errors of the console."""
        return {"faults": self.axe(), "errors": self.errors}

    def save_webp(self, file: str) -> None:
        """A picture of the whole page, smaller than a PNG; Playwright has no method for this format."""
        session = self.page.context.new_cdp_session(self.page)
        form = {"format": "webp", "quality": WEBP_QUALITY, "captureBeyondViewport": True}
        Path(file).write_bytes(base64.b64decode(session.send("Page.captureScreenshot", form)["data"]))

    def kilobytes(self) -> float:
        """What the page has transferred until now, in thousands of bytes."""
        entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        return float(self.page.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.transferSize, 0)")) / 1000

    def first_paint_s(self) -> float:
        """Seconds from the navigation to the first content."""
        entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        return float(self.page.evaluate(entry)) / 1000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; Playwright's own is not downloaded."""
    path = shutil.which("chromium")
    assert path, "install Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, look: str = "desktop-light") -> Iterator[Opened]:
    """The page at `url` in a new session of the browser."""
    context = browser.new_context(**LOOKS[look])
    context.set_default_timeout(WAIT_MS)
    shown = Opened(context.new_page())
    shown.page.on("console", lambda said: shown.errors.append(said.text) if said.type == "error" else None)
    shown.page.on("pageerror", lambda error: shown.errors.append(str(error)))
    shown.page.goto(url)
    yield shown
    context.close()


@contextmanager
def logged_in(browser: Browser, url: str, key: str, next_page: str = "/dashboard") -> Iterator[Opened]:
    """The dashboard, of somebody who has typed this key."""
    with opened(browser, f"{url}/login?next={next_page}") as shown:
        shown.page.get_by_label("API key").fill(key)
        shown.page.keyboard.press("Enter")
        shown.page.get_by_text("Serving").wait_for()
        yield shown


def every_look(address: str, picture: str, use: Callable[[Opened], dict[str, Any]]) -> dict[str, Any]:
    """Every look of a view, by name, after `use`, which returns what it has seen of it."""
    seen = {}
    with chromium() as browser:
        for look in LOOKS:
            with opened(browser, address, look) as shown:
                said = {"kilobytes": shown.kilobytes(), **use(shown)}
                shown.page.screenshot(path=f"{picture}-{look}.png", full_page=True)
                sideways = shown.page.evaluate("document.documentElement.scrollWidth > innerWidth")
                seen[look] = {**shown.state(), "sideways": sideways, **said}
    return seen


def commands(url: str, pictures: str, view: str) -> dict[str, Any]:
    """The commands that a view shows in the place of what the server does not do."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/{view}") as shown:
        found = shown.page.locator(".command code")
        found.first.wait_for()
        shown.page.screenshot(path=f"{pictures}/{view}-off.png", full_page=True)
        return {"commands": found.all_inner_texts(), **shown.state()}
