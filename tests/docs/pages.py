"""The pages of the root and of docs/ as data: code blocks, links, headings, code spans.

A comment on the line before a code block says how the tests treat it:

    <!-- not run: REASON -->      the block is skipped; `test_pages.py` lists the reasons
    <!-- slow: REASON -->         only the second stage runs it: `pytest tests/docs -m slow`
    <!-- stopped after N s -->    the block never ends: it must still run after N seconds, and is then interrupted;
                                  `slow: stopped after N s` is both
    <!-- output -->               each line of the block must occur in what the block before it printed

A block with a title, as in ```python title="learn.py", is a file that the commands after it use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OF_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = (*_OF_ROOT, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

_FENCE = re.compile(r'```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?')
_NOTE = re.compile(r"<!-- (?P<kind>not run|slow|stopped|output)(?::? (?P<detail>.+))? -->")
_STOPPED = re.compile(r"after (\d+) s")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"#{1,6} (?P<text>.+)")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced code block; `line` is that of its fence, 1 the first. `note`: kind of the comment before it, or ""."""

    page: str
    line: int
    language: str
    title: str
    note: str
    detail: str
    text: str

    @property
    def stopped_after_s(self) -> float | None:
        """When it is interrupted; None: it ends by itself."""
        found = _STOPPED.search(self.detail) if self.note in ("slow", "stopped") else None
        return float(found[1]) if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def lines_of(page: str) -> tuple[str, ...]:
    return tuple((ROOT / page).read_text().splitlines())


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """Raises ValueError: a fence names no language, or a block is not closed."""
    return tuple(_blocks(page, lines_of(page)))


def prose_of(page: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks and comments, with their numbers."""
    inside = {n for block in blocks_of(page) for n in range(block.line, block.line + block.text.count("\n") + 2)}
    for number, line in enumerate(lines_of(page), 1):
        if number not in inside and not line.startswith("<!--"):
            yield number, line


def links_of(page: str) -> list[tuple[str, str]]:
    """(place, target) of each link."""
    return [(f"{page}:{n}", found["target"]) for n, line in prose_of(page) for found in _LINK.finditer(line)]


def spans_of(page: str) -> list[tuple[str, str]]:
    """(place, text) of each code span."""
    return [(f"{page}:{n}", text) for n, line in prose_of(page) for text in _SPAN.findall(line)]


def table_of(page: str, header: str) -> list[list[str]]:
    """The cells of each row of the table whose first line is `header`. Raises ValueError: there is no such table."""
    lines = lines_of(page)
    rows = takewhile(lambda line: line.startswith("|"), lines[lines.index(header) + 2 :])
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


@cache
def anchors_of(page: str) -> frozenset[str]:
    """The anchors of its headings, as GitHub and mkdocs make them."""
    headings = (_HEADING.fullmatch(line) for _, line in prose_of(page))
    return frozenset(_slug(heading["text"]) for heading in headings if heading)


def _slug(heading: str) -> str:
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _blocks(page: str, lines: tuple[str, ...]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        if not lines[number].startswith("```"):
            number += 1
            continue
        fence = _FENCE.fullmatch(lines[number])
        if fence is None or "```" not in lines[number + 1 :]:
            raise ValueError(f"{page}:{number + 1}: a code block names its language, and is closed by a line of ```")
        end = lines.index("```", number + 1)
        if any(line.startswith("```") for line in lines[number + 1 : end]):
            raise ValueError(f"{page}:{number + 1}: another code block begins before this one is closed")
        note = _NOTE.fullmatch(lines[number - 1]) if number else None
        kind, detail = (note["kind"], note["detail"] or "") if note else ("", "")
        text = "".join(f"{line}\n" for line in lines[number + 1 : end])
        yield Block(page, number + 1, fence["language"], fence["title"] or "", kind, detail, text)
        number = end + 1
