"""What a version learnt from, in the view Adapters; and what pushed an answer, in the view Trajectories."""

from __future__ import annotations

from typing import Any

from pages import Opened, every_look


def versions(url: str, pictures: str, version: str) -> dict[str, Any]:
    """The updates of a version, and the answers of the newest."""

    def use(shown: Opened) -> dict[str, Any]:
        page = shown.page
        page.get_by_role("button", name="What it learnt from").click()
        updates = page.get_by_role("region", name=f"Updates of {version}")
        updates.locator("tbody button").first.click()
        answers = page.get_by_role("region", name="Answers of update")
        answers.locator("tbody tr").first.wait_for()
        return {"updates": updates.locator("tbody tr").count(), "answers": answers.locator("tbody tr").count()}

    return every_look(f"{url}/dashboard#/adapters/{version}", f"{pictures}/why-version", use)


def answers(url: str, pictures: str, answer: str) -> dict[str, Any]:
    """What pushed an answer."""

    def use(shown: Opened) -> dict[str, Any]:
        page = shown.page
        page.get_by_role("button", name="Why Answer 1?").click()
        page.get_by_text("An estimate at the weights of").wait_for()
        found = [page.get_by_role("region", name=f"Pushed {way} it") for way in ("towards", "away from")]
        return {"pushes": sum(each.locator("tbody tr").count() for each in found)}

    return every_look(f"{url}/dashboard#/trajectories/{answer}", f"{pictures}/why-answer", use)
