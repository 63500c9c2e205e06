"""The rows of a file of tasks or preferences: JSONL, or parquet with the extra `parquet`. The Hugging Face hub may have
the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras import PARQUET

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Of a JSONL file; of a parquet file, also of its rows written as JSON."""

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_SUFFIXES = (".jsonl", ".parquet")
_ROWS_AT_ONCE = 256
_SURROGATE = rb"\ud"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: any JSON value. `place`: its line or row, 1 the first, for messages. `fault`: why it cannot be read."""

    place: str
    value: object = None
    fault: Exception | None = None


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


def rows_of(file: Path, setting: str = "environment") -> Iterator[Row]:
    """The rows of a file. `setting`: what errors name.

    Raises:
        ConfigError: the file cannot be read, or is too large.
    """
    return _parquet_rows(file, setting) if file.suffix == ".parquet" else _jsonl_rows(file, setting)


def _json(line: bytes) -> object:
    """Raises ValueError, RecursionError: it is no JSON, or has half of a surrogate pair, which no tokenizer takes."""
    value = json.loads(line.decode("utf-8-sig"))
    if _SURROGATE in line.lower():
        check_surrogates(value)
    return value


def check_surrogates(value: object) -> None:
    """Raises ValueError if a JSON value has half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"{half} is half of a surrogate pair, which is no character") from None


def _jsonl_rows(file: Path, setting: str) -> Iterator[Row]:
    for number, line in enumerate(_read(file, setting).split(b"\n"), 1):
        if line.strip():
            try:
                yield Row(f"line {number}", _json(line))
            except (ValueError, RecursionError) as error:
                yield Row(f"line {number}", fault=error)


def _read(file: Path, setting: str) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise _too_large(file, setting)
    return content


def _parquet_rows(file: Path, setting: str) -> Iterator[Row]:
    """Values that JSON lacks, such as dates, become text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {PARQUET.missing}") from error
    number = size = 0
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise _too_large(file, setting)
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    text = json.dumps(row, default=str)
                    number, size = number + 1, size + len(text)
                    if size > MAX_FILE_BYTES:
                        raise _too_large(file, setting)
                    yield Row(f"row {number}", json.loads(text))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error}") from error


def _too_large(file: Path, setting: str) -> ConfigError:
    return ConfigError(f"{setting}: {file} has more than {MAX_FILE_BYTES // 2**20} MiB; give a part of it")


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
