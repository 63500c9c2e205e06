"""Each row of docs/promises.md names tests that exist, and its figures are those of their records."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from docs.pages import ROOT, lines_of

ROWS = [line for line in lines_of("docs/promises.md") if re.match(r"\| (?!promise|sent)[^|-]", line)]
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_FIGURE = re.compile(r"(-?\d[\d.]*)[^\d|<>]*<!-- (\w+): ([^>]+) -->")
"""A number, and behind it, unseen, its record with the name of a figure or the path of a value."""


def test_each_promise_has_a_test_that_exists() -> None:
    assert len(ROWS) > 90
    assert [row for row in ROWS if not _TEST.search(row)] == []
    named = {found for row in ROWS for found in _TEST.findall(row)}
    assert sorted(f"{file}::{name}" for file, name in named if name not in _tests_of(file)) == []


@cache
def _tests_of(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    body = ast.parse(path.read_text()).body if path.is_file() else ()
    return frozenset(each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def _figures() -> Iterator[tuple[str, str, str]]:
    for row in ROWS:
        found = _FIGURE.findall(row)
        assert len(found) == row.count("<!--"), row
        yield from found


@pytest.mark.parametrize(("shown", "record", "name"), [*_figures()])
def test_figures(shown: str, record: str, name: str) -> None:
    content = json.loads((ROOT / "benchmarks/results" / f"{record}.json").read_text())
    medians = {figure["name"]: figure["value"]["median"] for figure in content.get("figures", ())}
    value = medians[name] if name in medians else _at(content, name)
    assert shown == f"{value:.{len(shown.partition('.')[2])}f}"


def _at(content: Any, path: str) -> float:
    for key in path.split("."):
        content = content[key]
    return float(content)
