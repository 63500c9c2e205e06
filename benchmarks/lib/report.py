"""Prints tables and writes the JSON record of a benchmark."""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.figures import Figure

RESULTS = Path(__file__).parents[1] / "results"
"""Where the record of each benchmark lies."""
WIDTH = 120
"""Columns of a table if stdout is not a terminal."""

MARKS = {True: "[green]pass[/]", False: "[red]miss[/]", None: ""}


def show(figures: Iterable[Figure], *tables: Table) -> None:
    """Prints the tables of a benchmark, then its figures."""
    shown = console()
    for table in tables:
        shown.print(table)
    shown.print(_figures(figures))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def setting(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a run, for its record, without those that are paths of the machine."""
    return {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}


def write(file: Path, report: dict[str, Any], figures: Iterable[Figure]) -> None:
    """Writes the record as JSON. A figure that could not be measured is null."""
    judged = [{**asdict(figure), "met": figure.met} for figure in figures]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_finite({**report, "figures": judged}), indent=2, allow_nan=False) + "\n")


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
