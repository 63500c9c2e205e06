"""The rows of a file, any of which can be read again by its number: JSONL, a JSON array, CSV, TSV or parquet.

A JSONL file stays where it is, and only the offsets of its lines are kept. The rows of other files are copied into a
temporary file of that form, so that a file of many gigabytes takes little memory.
"""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import DATASETS, PARQUET
from mlx_parallm.rl.task_files import check_surrogates, find_file

LONGEST_ROW = 64 << 20
"""Bytes of a row. A longer one is not read."""
_LARGEST_ARRAY = 1 << 30
"""Bytes of a JSON array, which is read as a whole."""
_ROWS_AT_ONCE = 256
_LONGEST_NAME = 200
"""Characters of a column's name, which is copied into each row."""
_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_TABLES = {".csv": ",", ".tsv": "\t"}
"""The delimiters of files whose first line names the columns."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"

Row = Mapping[str, Any]


class Rows:
    """The rows of an open file of JSON objects, one a line. Lines without text are no rows.

    `place(n)` says where people find row n, such as `line 7`.
    """

    def __init__(self, file: BinaryIO, of_lines: bool, lines: Iterable[int] | None = None) -> None:
        """`of_lines`: the file is the one that people see, and places are its lines. `lines`: the line where each row
        begins in the file that people see, if that is another one; None: its rows have no lines."""
        self._file, self._word = file, "line" if of_lines or lines is not None else "row"
        self._offsets, self._numbers = array("Q"), array("Q")
        given = None if lines is None else iter(lines)
        for number, (offset, blank) in enumerate(_line_starts(file), 1):
            if not blank:
                self._offsets.append(offset)
                self._numbers.append(number if given is None else next(given))

    def __len__(self) -> int:
        return len(self._offsets)

    def place(self, number: int) -> str:
        return f"{self._word} {self._numbers[number]}"

    def read(self, number: int) -> Row:
        """The row. Raises ValueError, RecursionError: it is no JSON object, or too long."""
        self._file.seek(self._offsets[number])
        line = self._file.readline(LONGEST_ROW + 1)
        if len(line) > LONGEST_ROW:
            raise ValueError(f"it has more than {LONGEST_ROW >> 20} MiB")
        return _object(line)


def open_rows(name: str, setting: str) -> Rows:
    """The rows of a file, or of a data set of the hub, which is downloaded unless it is in the cache. With the package
    `datasets` it may be any data set, also a folder, and the name of a split or a configuration may follow it:
    org/name:test, org/name:default:test.

    Args:
        setting: what errors name.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    path = Path(name).expanduser()
    known, *parts = name.split(":")
    if not path.is_file() and (Path(known).is_dir() or _HUB_ID.fullmatch(known)):
        if DATASETS.installed:
            return _of_data_set(known, parts, setting)
        if parts:
            raise ConfigError(f"{setting}: {name} names a part of a data set: {DATASETS.missing}")
    if path.suffix.lower() not in _TABLES and not path.is_file():
        path = find_file(name, setting) or path
    try:
        return _opened(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{setting}: {path} cannot be read: {reason}") from error


def _opened(path: Path) -> Rows:
    if path.is_dir():
        raise ValueError("it is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ValueError("it is a pipe or a device, which can be read only once; save its rows as a file")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _spooled(_parquet(path))
    file = path.open("rb")
    start = file.read(1024)
    if start.startswith(_UTF16):
        raise ValueError("it is UTF-16; save it as UTF-8")
    if (delimiter := _TABLES.get(suffix)) is not None:
        lines = array("Q")
        return _spooled(_table(path, delimiter, lines), lines)
    if start.removeprefix(_BOM).lstrip()[:1] == b"[":
        return _spooled(_json_array(file))
    file.seek(0)
    return Rows(file, of_lines=True)


def _spooled(rows: Iterable[Any], lines: array[int] | None = None) -> Rows:
    """Copies rows into a temporary file, which goes when it is closed. `lines`: see `Rows`; filled by `rows`."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as its rows are
    for row in rows:
        file.write(json.dumps(row, default=str).encode() + b"\n")
    file.flush()
    return Rows(file, of_lines=False, lines=lines)


def _of_data_set(name: str, parts: list[str], setting: str) -> Rows:
    """`parts`: the split, and before it the configuration if there are two."""
    from datasets import load_dataset

    *configurations, split = parts or ["train"]
    try:
        return _spooled(load_dataset(name, *configurations[-1:], split=split))
    except Exception as error:  # what a data set is made of decides what it raises
        raise ConfigError(f"{setting}: the data set {name} cannot be read: {error}") from error


# -- the forms of files ----------------------------------------------------------------------------


def _line_starts(file: BinaryIO) -> Iterator[tuple[int, bool]]:
    """The offset of each line, and whether it is blank. A line ends with \\n or \\r\\n, and with nothing else."""
    file.seek(0)
    offset = 0
    while piece := file.readline(LONGEST_ROW):
        start, blank = offset, not piece.removeprefix(_BOM).strip()
        offset += len(piece)
        while not piece.endswith(b"\n") and (piece := file.readline(LONGEST_ROW)):
            offset += len(piece)
        yield start, blank


def _object(line: bytes) -> Row:
    value = json.loads(line.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError('it is not a JSON object, such as {"messages": […]}')
    if b"\\u" in line:
        check_surrogates(value)
    return value


def _json_array(file: BinaryIO) -> Iterator[Any]:
    if os.fstat(file.fileno()).st_size > _LARGEST_ARRAY:
        raise ValueError(f"it is one JSON array of more than {_LARGEST_ARRAY >> 30} GiB; make it JSONL, one row a line")
    file.seek(0)
    yield from json.loads(file.read().decode("utf-8-sig"))


def _table(path: Path, delimiter: str, lines: array[int]) -> Iterator[dict[str, Any]]:
    """The rows of CSV, whose quoted fields may have line breaks. Notes in `lines` where each row begins. Bytes that are
    not UTF-8 become halves of surrogate pairs, which `_object` refuses. Raises ValueError: it has another delimiter, or
    no names of columns."""
    csv.field_size_limit(LONGEST_ROW)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        reader = csv.reader(opened, delimiter=delimiter, strict=False)
        header = [name.strip() for name in next(reader, [])]
        if len(header) == 1 and (others := sorted(set(";|\t,").intersection(header[0]))):
            raise ValueError(f"its first line is separated by {others[0]!r}; save it with {delimiter!r}")
        if (longest := max(map(len, header), default=0)) > _LONGEST_NAME:
            raise ValueError(
                "its first line has to name the columns, such as prompt and completion, each in at most "
                f"{_LONGEST_NAME} characters; one has {longest:,}"
            )
        before = reader.line_num
        for fields in reader:
            line, before = before + 1, reader.line_num
            if fields:
                lines.append(line)
                more = {"": fields[len(header) :]} if len(fields) > len(header) else {}
                yield {**dict(zip(header, fields, strict=False)), **more}


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(PARQUET.missing) from error
    try:
        with parquet.ParquetFile(path) as opened:
            for batch in opened.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
