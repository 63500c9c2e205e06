"""The view Trajectories: its looks; an answer is found, judged and corrected; new groups come; there are very many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pages import Opened, chromium, every_look, logged_in, opened
from playwright.sync_api import Locator, Page, expect

GROUPS = "Groups"
UPDATE_MS = 180_000
TO_THE_END = """
(element) => new Promise((resolve) => {
  const step = () => {
    const rows = Number(element.querySelector("table").getAttribute("aria-rowcount")) - 1;
    element.scrollTop += 1500;
    if (rows >= 10000 && element.scrollTop + element.clientHeight >= element.scrollHeight - 2) resolve(rows);
    else requestAnimationFrame(step);
  };
  step();
})
"""
"""Scrolls as fast as frames come, until 10,000 rows are there and the last one is in sight."""


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of a group that was trained on, with both tints."""

    def use(shown: Opened) -> dict[str, Any]:
        page = shown.page
        rows(page).first.click()
        tokens = page.get_by_role("group", name="Answer 1, token by token")
        advantage_tints = expect_some(page.locator(".sample .more, .sample .less"))
        faults = shown.axe()
        page.get_by_label("log-probability").check()
        logprob_tints = expect_some(page.locator(".sample [class*=rare-]"))
        tokens.locator("[data-place]").first.focus()
        page.keyboard.press("End")
        return {
            "faults": faults + shown.axe(),
            "kilobytes": shown.kilobytes(),
            "samples": page.locator(".sample").count(),
            "tints": [advantage_tints, logprob_tints],
            "readout": tokens.get_by_role("status").inner_text(),
        }

    return every_look(f"{url}/dashboard#/trajectories?fate=trained", f"{pictures}/trajectories", use)


def judges(url: str, pictures: str) -> dict[str, Any]:
    """Somebody looks for what waits for a reward, likes the second answer, and corrects it; and may not judge what was
    trained on."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/trajectories") as shown:
        page = shown.page
        page.get_by_label("Fate").select_option("waiting")
        expect(page.locator("tbody tr", has_text="trained on")).to_have_count(0)
        page.screenshot(path=f"{pictures}/trajectories-waiting.png")
        rows(page).filter(has_text="Say hello").click()
        sample = page.get_by_role("article", name="Answer 2")
        sample.get_by_role("button", name="Good").click()
        expect(page.locator(".toasts")).to_contain_text("Counted")
        sample.get_by_role("button", name="Correct answer 2").click()
        page.get_by_role("dialog").get_by_label("The right answer").fill("Hello!")
        page.screenshot(path=f"{pictures}/trajectories-correct.png")
        faults = shown.axe()
        page.get_by_role("dialog").get_by_role("button", name="Correct answer 2").click()
        expect(sample).to_contain_text("Corrected to: Hello!")
        page.screenshot(path=f"{pictures}/trajectories-judged.png", full_page=True)
        seen = {
            "address": page.url,
            "told": page.locator(".toasts").inner_text(),
            "sample": sample.inner_text(),
            "faults": faults + shown.axe(),
        }
        page.reload()
        expect(page.get_by_role("article", name="Answer 2")).to_contain_text("Corrected to: Hello!")
        seen["again"] = page.url
        page.get_by_label("Fate").select_option("trained")
        expect(page.locator("tr", has_text="trained on").first).to_be_visible()
        rows(page).first.click()
        page.locator(".facts .fate-trained").wait_for()
        closed = page.locator(".note").inner_text()
        return {**seen, "closed": closed, "errors": shown.errors}


def announces(url: str, pictures: str) -> dict[str, Any]:
    """New groups come while somebody looks at the list."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/trajectories") as shown:
        page = shown.page
        times = page.locator("tbody tr:not([aria-hidden]) td:last-child")
        times.first.wait_for()
        before = keys(page)
        show = page.get_by_role("button", name="new group")
        show.wait_for(timeout=UPDATE_MS)
        kept = keys(page)
        page.screenshot(path=f"{pictures}/trajectories-new.png", full_page=True)
        faults = shown.axe()
        show.click()
        expect(show).to_have_count(0)
        return {
            **{"before": before, "while_new_ones_came": kept, "after": keys(page)},
            **{"faults": faults, "errors": shown.errors},
        }


def many(url: str, pictures: str) -> dict[str, Any]:
    """Scrolls through 10,000 groups as fast as the page can, and filters them."""
    with chromium() as browser, opened(browser, "about:blank") as shown:
        page = shown.page
        with main_thread_tasks(page) as tasks:
            page.goto(f"{url}/dashboard#/trajectories")
            page.locator(".table").wait_for()
            count = page.locator(".table").evaluate(TO_THE_END)
            page.locator(".filters select").nth(1).select_option("dropped")
            page.locator("p.empty").wait_for()
            page.locator(".filters button").click()
            page.locator(".table button").first.click()
            page.locator(".sample").wait_for()
        page.screenshot(path=f"{pictures}/trajectories-many.png", full_page=True)
        return {"rows": count, "longest_task_ms": max(tasks), **shown.state()}


@contextmanager
def main_thread_tasks(page: Page) -> Iterator[list[float]]:
    """After the block, the milliseconds of processor time that each task of the page's main thread took in it. Time in
    which other processes had the processor does not count."""
    events: list[dict[str, Any]] = []
    tasks: list[float] = []
    browser = page.context.new_cdp_session(page)
    browser.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    browser.on("Tracing.tracingComplete", lambda _: tasks.extend(durations(events)))
    browser.send("Tracing.start", {"categories": "devtools.timeline,disabled-by-default-devtools.timeline"})
    yield tasks
    browser.send("Tracing.end")
    while not tasks:
        page.wait_for_timeout(50)


def durations(events: list[dict[str, Any]]) -> list[float]:
    """Of the tasks of the threads that render pages, in a trace of Chromium."""
    named = [event for event in events if event["name"] == "thread_name"]
    main = {(event["pid"], event["tid"]) for event in named if event["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if event["name"] == "RunTask" and (event["pid"], event["tid"]) in main]
    return [event.get("tdur", 0) / 1000 for event in tasks]


def roles(url: str, key: str, pictures: str) -> dict[str, Any]:
    """What a key sees: its own groups, or a sentence in their place."""
    with chromium() as browser, logged_in(browser, url, key) as shown:
        page = shown.page
        page.goto(f"{url}/dashboard#/trajectories")  # the navigation has it for keys that may see it
        said = page.locator(".empty", has_not_text="Asking").or_(rows(page)).first
        said.wait_for()
        page.screenshot(path=f"{pictures}/trajectories-role.png", full_page=True)
        return {"said": said.inner_text(), **shown.state()}


def rows(page: Page) -> Locator:
    """The buttons that open the groups in sight."""
    return page.get_by_role("table", name=GROUPS).get_by_role("button")


def keys(page: Page) -> list[str]:
    """What the first rows of the list say, without their fates, which may change."""
    found = page.locator("tbody tr:not([aria-hidden])").all()[:8]
    return [" ".join(row.locator("td").nth(at).inner_text() for at in (0, 4, 6)) for row in found]


def expect_some(found: Locator) -> int:
    """How many there are, when there is one."""
    found.first.wait_for()
    return found.count()
