"""Tables and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMES = 8


def table(rows: Sequence[Sequence[str]]) -> str:
    """One line a row, columns as wide as their longest cell; every row has the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def listed(names: Sequence[str]) -> str:
    """`none`, `math, tone`, or the first few and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "") or "none"
