"""The view Playground: two versions on one prompt, thumbs, tokens, what is refused, and what a role may not do."""

from __future__ import annotations

from typing import Any

from pages import Opened, chromium, every_look, logged_in, opened
from playwright.sync_api import Locator, Page, expect

QUESTION = "Name three fruits."
ANSWERED_MS = 180_000
"""Two answers, which may wait for updates."""


def compares(url: str, pictures: str) -> dict[str, Any]:
    """The base model and the adapter answer two questions; then a thumb rewards an answer of the adapter."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/playground") as shown:
        page = shown.page
        chosen = [select.input_value() for select in selects(page)]
        limit(page, 24)
        answers = ask(page, QUESTION)
        hovered = hover(page, answers[0])
        faults = shown.axe()
        page.screenshot(path=f"{pictures}/playground-hover.png", full_page=True)
        focused = walk(page, answers[1])
        page.get_by_label("Learn from my thumbs").check()
        explained = page.locator(".learn small").inner_text()
        answers = ask(page, "Which of them is red?")
        thumbs = [answer.get_by_role("button", name="Good").count() for answer in answers]
        good = answers[1].get_by_role("button", name="Good")
        good.click()
        expect(page.locator(".toasts")).to_contain_text("Noted")
        expect(good).to_have_attribute("aria-pressed", "true")
        page.screenshot(path=f"{pictures}/playground-thumb.png", full_page=True)
        return {
            "chosen": chosen,
            "names": [answer.locator("h3").inner_text() for answer in answers],
            "texts": [answer.locator(".tokens").inner_text() for answer in answers],
            "turns": page.locator(".turns > li").count(),
            "hovered": hovered,
            "focused": focused,
            "explained": explained,
            "thumbs": thumbs,
            "faults": [*faults, *shown.axe()],
            "errors": shown.errors,
        }


def looks(url: str, pictures: str) -> dict[str, Any]:
    """Every look of the view with a question that was answered. Its size is that without the answers."""

    def use(shown: Opened) -> dict[str, Any]:
        selects(shown.page)
        kilobytes = shown.kilobytes()
        limit(shown.page, 16)
        ask(shown.page, QUESTION)
        return {"kilobytes": kilobytes}

    return every_look(f"{url}/dashboard#/playground", f"{pictures}/playground", use)


def same_seed(url: str, pictures: str) -> list[str]:
    """The base model on both sides: what it says is the same, and another seed says something else."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/playground/base/base") as shown:
        limit(shown.page, 24)
        texts = [answer.inner_text() for answer in ask(shown.page, QUESTION)]
        shown.page.get_by_role("button", name="Clear").click()
        shown.page.get_by_label("Seed", exact=True).fill("2")
        return [*texts, *(answer.inner_text() for answer in ask(shown.page, QUESTION))]


def stops(url: str, pictures: str) -> dict[str, Any]:
    """A long answer is stopped, and the next one goes on from what it has said."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/playground") as shown:
        page = shown.page
        learn = page.locator(".learn small").inner_text()
        send(page, "Write a long story about the sea.")
        expect(page.locator(".tokens [data-place='5']").first).to_be_visible(timeout=ANSWERED_MS)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("It was stopped.").first).to_be_visible(timeout=ANSWERED_MS)
        stopped = page.locator(".tokens").first.inner_text()
        page.screenshot(path=f"{pictures}/playground-stopped.png", full_page=True)
        limit(page, 4)
        ask(page, "Go on.")
        sides = page.locator(".turns > li").first.locator("section").count()
        return {"learn": learn, "stopped": stopped, "sides": sides, **shown.state()}


def fails(url: str, pictures: str) -> dict[str, Any]:
    """A version that is not there costs its own side only."""
    with chromium() as browser, opened(browser, f"{url}/dashboard#/playground/base/nobody") as shown:
        page = shown.page
        limit(page, 8)
        answers = ask(page, QUESTION)
        page.screenshot(path=f"{pictures}/playground-failed.png", full_page=True)
        texts = [answer.inner_text() for answer in answers]
        asked = [error for error in shown.errors if "404" not in error]  # the browser itself notes the answer
        return {"texts": texts, "faults": shown.axe(), "errors": asked}


def role(url: str, key: str, pictures: str) -> dict[str, Any]:
    """Somebody whose key may chat, and may not teach."""
    with chromium() as browser, logged_in(browser, url, key) as shown:
        page = shown.page
        page.get_by_role("link", name="Playground").click()
        limit(page, 8)
        (answer, *_) = ask(page, QUESTION)
        box = page.get_by_label("Learn from my thumbs")
        page.screenshot(path=f"{pictures}/playground-role.png", full_page=True)
        return {
            "text": answer.locator(".tokens").inner_text(),
            "enabled": box.is_enabled(),
            "why": page.locator(".learn small").inner_text(),
            **shown.state(),
        }


def selects(page: Page) -> list[Locator]:
    expect(page.get_by_label("Compared with")).to_be_visible()
    return [page.get_by_label("Version", exact=True), page.get_by_label("Compared with")]


def limit(page: Page, tokens: int) -> None:
    """Answers have at most so many tokens from now on."""
    field = page.get_by_label("Longest answer, in tokens")
    page.locator("summary", has_text="Settings").wait_for()
    if not field.is_visible():
        page.locator("summary", has_text="Settings").click()
    field.fill(str(tokens))


def send(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def ask(page: Page, question: str) -> list[Locator]:
    """Asks by keyboard, and returns the answers, when all are complete."""
    turns = page.locator(".turns > li")
    before = turns.count()
    send(page, question)
    expect(turns).to_have_count(before + 1)
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=ANSWERED_MS)
    return turns.last.locator("section").all()


def hover(page: Page, answer: Locator) -> str:
    """What the pointer shows about the second token."""
    answer.locator("[data-place='1']").hover()
    return about(answer)


def walk(page: Page, answer: Locator) -> list[str]:
    """What the keyboard shows: about the token that Tab reaches, about the next one, and nothing after Escape."""
    page.get_by_label("Message").focus()
    while not answer.locator("[data-place]:focus").count():
        page.keyboard.press("Shift+Tab")
    first = about(answer)
    page.keyboard.press("ArrowRight")
    second = about(answer)
    page.keyboard.press("Escape")
    expect(answer.get_by_role("status")).to_be_empty()
    return [first, second]


def about(answer: Locator) -> str:
    expect(answer.get_by_role("status")).to_contain_text("%")
    return answer.get_by_role("status").inner_text()
