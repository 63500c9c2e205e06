#!/usr/bin/env python3
"""Writes benchmarks/RESULTS.md from the records in benchmarks/results, with what moved since the record before.

    scripts/results_page.py          # after a benchmark has written its record
    scripts/results_page.py --check  # fails if the page is not current; changes nothing

The record before is the newest commit's version of the same file that differs from the present one, so the page stays
the same when the new record is committed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
MOVED = 0.05
INTRODUCTION = f"""# Benchmark results

Written by `scripts/results_page.py` from the JSON records in [results/](results); do not edit it. Each record is the
newest run of one benchmark. A figure is the median of its repeats, with the least and the most in brackets; a limit is
what the benchmark asks of it. Figures that differ by more than {MOVED:.0%} from the record before are listed below the
table; two records may come from different machines, which the list says.
"""


@dataclass(frozen=True)
class Figure:
    """One figure of a record, as the page shows it."""

    unit: str
    median: float | None
    text: str
    limit: str = ""
    met: str = ""


@dataclass(frozen=True)
class Record:
    """One file of benchmarks/results. `machine`: what it was measured on, in one line."""

    machine: str
    figures: dict[str, Figure]


def read(text: str) -> Record:
    data = json.loads(text)
    if "figures" in data:
        figures = {figure["name"]: _judged(figure) for figure in data["figures"]}
    else:
        figures = {name: Figure("", value, _number(value)) for name, value in _plain_numbers(data)}
    return Record(_machine(data["machine"]), figures)


def _judged(figure: dict[str, Any]) -> Figure:
    value, limit, unit = figure["value"], figure["limit"], figure["unit"]
    median = value["median"]
    text = _number(median)
    if value["low"] != value["high"]:
        text += f" ({_number(value['low'])}–{_number(value['high'])})"
    sign = "≥" if figure["at_least"] else "≤"
    met = {True: "met", False: "missed", None: ""}[figure["met"]]
    return Figure(unit, median, f"{text} {unit}".strip(), f"{sign} {_number(limit)}" if limit is not None else "", met)


def _plain_numbers(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record that has no list of figures, by their paths; lists and the setting are left out."""
    for key, value in data.items():
        if key in ("machine", "setting"):
            continue
        if isinstance(value, dict):
            yield from _plain_numbers(value, f"{path}{key}, ")
        elif isinstance(value, int | float):
            yield f"{path}{key}", value


def _machine(machine: dict[str, Any]) -> str:
    parts = [machine["processor"]]
    if "cores" in machine:
        parts += [f"{machine['cores']} cores", f"Python {machine['python']}", f"MLX {machine['packages']['mlx']}"]
        parts.append(f"load average {machine['load_average'][0]} at the start")
    else:
        parts.append(f"MLX {machine['mlx']}")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    """Three or four significant digits; large numbers as whole ones."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(file) for file in sorted(RECORDS.glob("*.json")))])


def _section(file: Path) -> str:
    text = file.read_text()
    record = read(text)
    lines = [
        f"## {file.stem.replace('_', ' ')}",
        "",
        f"[Record](results/{file.name}): {record.machine}.",
        "",
        "| figure | value | limit | |",
        "|---|--:|--:|---|",
        *(f"| {name} | {item.text} | {item.limit} | {item.met} |" for name, item in record.figures.items()),
        "",
        *_moves(file, text, record),
    ]
    return "\n".join(lines)


def _moves(file: Path, text: str, record: Record) -> Iterator[str]:
    found = _before(file, text)
    if found is None:
        yield from ("This is its first record.", "")
        return
    date, before = found
    rows = [
        f"| {name} | {old.text} | {new.text} | {change:+.0%} |"
        for name, new in record.figures.items()
        if (old := before.figures.get(name)) and abs(change := _change(old.median, new.median)) > MOVED
    ]
    since = f"the record of {date} ({before.machine})"
    if not rows:
        yield from (f"Nothing moved by more than {MOVED:.0%} against {since}.", "")
        return
    yield from (f"Moved by more than {MOVED:.0%} against {since}:", "")
    yield from ("| figure | before | now | change |", "|---|--:|--:|--:|", *rows, "")


def _change(old: float | None, new: float | None) -> float:
    """Relative to `old`; 0 if there is none."""
    return new / old - 1 if old and new is not None else 0.0


def _before(file: Path, text: str) -> tuple[str, Record] | None:
    """Date and content of the record before; None where there is none."""
    path = str(file.relative_to(ROOT))
    for line in _git("log", "--format=%H %as", "--", path).splitlines():
        commit, date = line.split()
        try:
            old = _git("show", f"{commit}:{path}")
        except subprocess.CalledProcessError:  # the commit that deleted it
            continue
        if old != text:
            return date, read(old)
    return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Change nothing; fail if the page is not current.")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("benchmarks/RESULTS.md is not current: run scripts/results_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
