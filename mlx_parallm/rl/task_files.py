"""The rows of a file of tasks or preferences: JSONL, or parquet with the extra `parquet`. The Hugging Face hub may have
the file."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.optional_packages import PARQUET

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Of a JSONL file; of a parquet file, also of its rows written as JSON."""

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_SUFFIXES = (".jsonl", ".parquet")
_ROWS_AT_ONCE = 256
_LOGGED_ROWS = 20
_SURROGATE = rb"\ud"

_log = logging.getLogger(__name__)

T = TypeVar("T")


def find_file(name: str, setting: str = "environment") -> Path | None:
    """The path of a file of tasks. One of a data set of the hub is downloaded unless it is in the cache.

    Args:
        setting: what errors name.

    Returns:
        None if `name` is neither the path of a file nor the id of a data set.

    Raises:
        ConfigError: the data set cannot be used.
    """
    path = Path(os.path.expanduser(name))
    if name.endswith(_SUFFIXES) or path.is_file():
        return path
    return _download(name, setting) if _HUB_ID.fullmatch(name) else None


def read_rows(
    file: Path, read: Callable[[Mapping[str, Any]], T], setting: str = "environment"
) -> tuple[dict[str, T], list[str]]:
    """What `read` makes of the rows of a file, each a JSON object, by `line 1`, `line 2`, and so on. A row that it
    cannot use is left out, and a line of the log says which.

    Args:
        read: raises ValueError, RecursionError or a RequestError if it cannot use a row.
        setting: what errors name.

    Returns:
        The results; and for people, which rows are left out and why.

    Raises:
        ConfigError: the file cannot be read, or is too large.
    """
    found: dict[str, T] = {}
    unusable = []
    for place, row in _rows(file, setting):
        try:
            if isinstance(row, Exception):
                raise row
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")
            found[place] = read(row)
        except (ValueError, RecursionError, RequestError) as error:
            unusable.append(f"{place} of {file} is left out: {error}")
    for message in unusable[:_LOGGED_ROWS]:
        _log.warning("%s", message)
    if others := unusable[_LOGGED_ROWS:]:
        _log.warning("%d more rows of %s are left out", len(others), file)
    return found, unusable


def check_surrogates(value: object) -> None:
    """Raises ValueError if a JSON value has half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"{half} is half of a surrogate pair, which is no character") from None


class _TooLargeError(Exception):
    """The file, or what it holds, has more than MAX_FILE_BYTES."""


def _rows(file: Path, setting: str) -> Iterator[tuple[str, object]]:
    """Each row with its place for messages: any JSON value, or the error of one that cannot be read."""
    try:
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    except _TooLargeError as error:
        most = f"{MAX_FILE_BYTES // 2**20} MiB"
        raise ConfigError(f"{setting}: {file} has more than {most}; give a part of it") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error}") from error


def _jsonl_rows(file: Path) -> Iterator[tuple[str, object]]:
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise _TooLargeError
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield f"line {number}", _json(line)


def _json(line: bytes) -> object:
    """The value, or the error if it is no JSON, or has half of a surrogate pair."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if _SURROGATE in line.lower():
            check_surrogates(value)
    except (ValueError, RecursionError) as error:
        return error
    return value


def _parquet_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Values that JSON lacks, such as dates, become text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(PARQUET.missing) from error
    number = size = 0
    if file.stat().st_size > MAX_FILE_BYTES:
        raise _TooLargeError
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    text = json.dumps(row, default=str)
                    number, size = number + 1, size + len(text)
                    if size > MAX_FILE_BYTES:
                        raise _TooLargeError
                    yield f"row {number}", json.loads(text)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _download(name: str, setting: str) -> Path:
    """The file of a data set: `train.jsonl`, or its only JSONL file, or else its only parquet file called train."""
    from huggingface_hub import snapshot_download  # takes long to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    advice = "download the file and give its path"

    def files(pattern: str) -> list[Path]:
        try:
            folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=pattern))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(f"{setting}: no file, and no data set {name!r} of the hub ({error}); {advice}") from error
        return list(folder.rglob(pattern))

    found = files("*.jsonl")
    chosen = [file for file in found if file.name == "train.jsonl"] or found
    if not chosen and PARQUET.installed:
        chosen = files("*train*.parquet")
    if len(chosen) != 1:
        kinds = "JSONL or parquet" if PARQUET.installed else "JSONL"
        missing = "" if PARQUET.installed or chosen else f" (for parquet: {PARQUET.missing})"
        raise ConfigError(
            f"{setting}: the data set {name!r} has {len(chosen)} {kinds} files to choose from{missing}; {advice}"
        )
    return chosen[0]
