"""The pictures of `docs/images`: each view as its page of the documentation shows it."""

from __future__ import annotations

import playground
import trajectories
from pages import Opened, chromium, opened

VIEWS = {
    "now": ".strip svg",
    "learning": ".tree svg",
    "trajectories": "table",
    "adapters": "table",
    "playground": "summary",
    "teach": "button:has-text('Start')",
    "cluster": "table",
}
"""What has to be there before the picture of a view is taken."""
OF_ONE_SERVER = " ".join(view for view in VIEWS if view != "cluster")
SETTLED_MS = 3000
"""Charts of the view Now get a point each second."""


def take(url: str, pictures: str, views: str = OF_ONE_SERVER) -> list[str]:
    """Writes a picture of each of these views, and returns the errors of the console. A group of trajectories is
    opened, and a question is asked in the playground."""
    errors = []
    with chromium() as browser:
        for view in views.split():
            with opened(browser, f"{url}/dashboard#/{view}", "desktop-light") as shown:
                shown.page.locator(VIEWS[view]).first.wait_for()
                _use(view, shown)
                shown.page.wait_for_timeout(SETTLED_MS)
                shown.save_webp(f"{pictures}/{view}.webp")
                errors += shown.errors
    return errors


def _use(view: str, shown: Opened) -> None:
    if view == "trajectories":
        trajectories.rows(shown.page).first.click()
    if view == "playground":
        playground.limit(shown.page, 16)
        playground.ask(shown.page, "What is a river? Answer in one short sentence.")
