"""What commands print: tables of plain text, or JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """One line for each row, with columns as wide as their longest cell. All rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json, for a command that calls `show`."""
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")


def show(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> int:
    """Prints `data` as JSON with --json, or else `text()`. Returns the exit status 0."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str) if args.json else text())
    return 0
