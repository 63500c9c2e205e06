"""A table for people, and JSON beside it."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import Figure
from rich.console import Console
from rich.table import Table
from spread import spread
from throughput import Point, Side

WIDTH = 120
"""Columns where the output is no terminal."""

MARKS = {True: "[green]pass[/]", False: "[red]miss[/]", None: ""}


def show(points: Sequence[Point], decode_rates: dict[str, list[float]], figures: Iterable[Figure]) -> None:
    shown = console()
    if points:
        shown.print(_throughput(points))
    if decode_rates:
        shown.print(_decode(decode_rates))
    shown.print(_figures(figures))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def write(file: Path, report: dict[str, Any], figures: Iterable[Figure]) -> None:
    """JSON; a figure that could not be measured is null."""
    judged = [{**asdict(figure), "met": figure.met} for figure in figures]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_finite({**report, "figures": judged}), indent=2, allow_nan=False) + "\n")


def _throughput(points: Sequence[Point]) -> Table:
    table = Table(title="Served, median (least–most) of the repeats")
    headers = ("clients", "server", "tok/s", "first token, s", "slowest, s", "answers", "resets", "errors")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 1 else "right")
    for point in points:
        for side in (point.ours, point.theirs):
            table.add_row(str(point.concurrency), *_cells(side))
    return table


def _cells(side: Side) -> list[str]:
    measured = [
        spread(side.rates).text(),
        spread(side.first_token_s).text(2),
        spread(side.slowest_first_token_s).text(2),
    ]
    return [side.name, *measured, *map(str, (side.requests, side.resets, len(side.errors)))]


def _decode(rates: dict[str, list[float]]) -> Table:
    table = Table("side", title="Decode while 16 rows decode, median (least–most) of the repeats")
    table.add_column("tok/s", justify="right")
    for name, values in rates.items():
        table.add_row(name, spread(values).text())
    return table


def _figures(figures: Iterable[Figure]) -> Table:
    table = Table("figure", title="Figures, median (least–most) of the repeats")
    for header in ("value", "limit"):
        table.add_column(header, justify="right")
    table.add_column("")
    for figure in figures:
        limit = "" if figure.limit is None else f"{'≥' if figure.at_least else '≤'} {figure.limit:.2f} {figure.unit}"
        table.add_row(figure.name, f"{figure.value.text(2)} {figure.unit}", limit, MARKS[figure.met])
    return table


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
