"""Counts and removes lines of a JSONL file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Wanted = Callable[[dict[str, Any]], bool]


def count_lines(path: Path, wanted: Wanted) -> int:
    """How many lines of a file are wanted; 0 if there is no file. Raises OSError."""
    return sum(found for _, found in _lines(path, wanted)) if path.is_file() else 0


def remove_lines(path: Path, unwanted: Wanted) -> None:
    """Removes lines of a file. Lines that another process appends meanwhile may be lost. Raises OSError."""
    if not count_lines(path, unwanted):
        return
    aside = path.with_name(f".tmp-{path.name}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, path.stat().st_mode & 0o777)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(line for line, found in _lines(path, unwanted) if not found)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _lines(path: Path, wanted: Wanted) -> Iterator[tuple[bytes, bool]]:
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # cut off by a crash
                record = None
            yield line, isinstance(record, dict) and wanted(record)
