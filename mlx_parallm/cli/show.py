"""What commands print: tables of plain text, or JSON for programs; and the small texts that several of them have."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from mlx_parallm.cli.parser import argument

JSON = argument("--json", action="store_true", help="Print JSON, for programs.")
"""The flag of a command that calls `show`."""


def show(args: argparse.Namespace, data: Any, text: str) -> int:
    """Prints `data` as JSON with --json, or else `text`. Returns the exit status 0."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str) if args.json else text)
    return 0


def table(rows: Sequence[Sequence[object]]) -> str:
    """One line for each row, with columns as wide as their longest cell, in which None is a dash. All rows have the
    same number of cells."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def local_time(unix: float) -> str:
    """A Unix time as people here write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def with_interval(mean: float, low: float, high: float) -> str:
    """A mean with the bounds of its confidence interval."""
    return f"{mean:.3f} [{low:.2f}, {high:.2f}]"
