"""Byte sizes: the one place that reads and writes them."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_EXACT = (("TiB", 2**40), ("TB", 10**12), ("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6))
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(value: object) -> int:
    """Bytes from a whole number, or from text such as `4GB` (10^9) or `1.5 GiB` (2^30), in any case.

    Raises:
        ValueError: not a size, or not at least one byte.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].upper() or "B") if match else None
    if match is None or unit is None:
        raise ValueError("must be a size in bytes such as 4GB, 512MiB or 1048576")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise ValueError("must be at least one byte")
    return size


def exact_bytes(size: int) -> int | str:
    """The shortest form that `parse_bytes` reads back to the same number."""
    return next((f"{size // unit}{name}" for name, unit in _EXACT if size and size % unit == 0), size)


def human_bytes(size: int) -> str:
    """Rounded, for people: `257.0 MiB`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{size} B"
        amount /= 1024
    return f"{amount:.1f} TiB"
