"""Rows of files of every kind, read again by their numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.files import rows as module
from mlx_parallm.extras.files.rows import Rows, open_rows
from mlx_parallm.optional_packages import DATASETS


def opened(tmp_path: Path, name: str, content: bytes) -> Rows:
    (tmp_path / name).write_bytes(content)
    return open_rows(str(tmp_path / name), "--sft")


def read(rows: Rows) -> list[tuple[str, object]]:
    return [(rows.place(number), rows.read(number)) for number in range(len(rows))]


def test_jsonl_has_a_row_a_line_whatever_wrote_it(tmp_path: Path) -> None:
    """A BOM, CRLF, blank lines, and separators that only Unicode takes for the end of a line."""
    rows = opened(tmp_path, "a.jsonl", '\ufeff{"a": 1}\r\n\r\n  \n{"a": "x\u2028y\u0085z"}\n{"a": 3}'.encode())
    assert read(rows) == [("line 1", {"a": 1}), ("line 4", {"a": "x\u2028y\u0085z"}), ("line 5", {"a": 3})]
    assert rows.read(0) == {"a": 1}


@pytest.mark.parametrize("line", [b"[1]", b"{", b"\xff{}", b'{"a": "\\ud800"}'])
def test_a_line_that_is_no_object_is_only_an_error_of_its_row(tmp_path: Path, line: bytes) -> None:
    rows = opened(tmp_path, "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"JSON|utf-8|surrogate|Expecting"):
        rows.read(1)
    assert rows.read(2) == {"a": 2}


def test_a_row_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_ROW", 1 << 20)
    rows = opened(tmp_path, "a.jsonl", b'{"a": "' + b"x" * (3 << 20) + b'"}\n{"a": 2}\n')
    with pytest.raises(ValueError, match="more than 1 MiB"):
        rows.read(0)
    assert rows.read(1) == {"a": 2}


def test_csv_keeps_quoted_line_breaks_and_names_lines(tmp_path: Path) -> None:
    content = '\ufeffprompt,completion\r\n"a, ""b""\nc",d\r\n\r\ne,f,g\r\n'
    rows = opened(tmp_path, "a.csv", content.encode())
    assert read(rows) == [
        ("line 2", {"prompt": 'a, "b"\nc', "completion": "d"}),
        ("line 5", {"prompt": "e", "completion": "f", "": ["g"]}),
    ]
    assert read(opened(tmp_path, "a.tsv", b"a\tb\n1\t2\n")) == [("line 2", {"a": "1", "b": "2"})]


def test_a_json_array_and_parquet_have_rows_by_number(tmp_path: Path) -> None:
    given = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    assert read(opened(tmp_path, "a.json", json.dumps(given, indent=2).encode())) == [
        ("row 1", given[0]),
        ("row 2", given[1]),
    ]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}] * 3), tmp_path / "a.parquet")
    assert read(open_rows(str(tmp_path / "a.parquet"), "--sft"))[2] == ("row 3", {"messages": messages})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n".encode("utf-16"), "a.jsonl cannot be read: it is UTF-16; save it as UTF-8"),
        ("a.json", b"[1, 2", "a.json cannot be read"),
        ("a.parquet", b"PAR0", "a.parquet cannot be read"),
        ("a.json", b"[" * 100_000, "a.json cannot be read: maximum recursion depth"),
        ("a.csv", b"prompt;completion\na;b\n", "its first line is separated by ';'; save it with ','"),
        ("A.TSV", b"prompt,completion\na,b\n", "its first line is separated by ','; save it with '\\\\t'"),
        ("a.tsv", b"a question" * 50 + b"\tan answer\n", "its first line has to name the columns, .*; one has 500"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--sft: .*{message}"):
        opened(tmp_path, name, content)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="it is a pipe or a device"):
        open_rows(str(tmp_path / "a.jsonl"), "--sft")


def test_bytes_that_are_not_utf8_cost_their_row(tmp_path: Path) -> None:
    rows = opened(tmp_path, "A.CSV", b"prompt,completion\n\xe4,b\nc,d\n")
    with pytest.raises(ValueError, match="is it UTF-8"):
        rows.read(0)
    assert rows.read(1) == {"prompt": "c", "completion": "d"}


def test_a_data_set_has_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package `datasets` only. A folder stands for a data set of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "org" / "set").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "org" / "set" / f"{split}.jsonl").write_text(json.dumps({"text": split}))
    if not DATASETS.installed:
        with pytest.raises(ConfigError, match="names a part of a data set: datasets is not installed"):
            open_rows("org/set:test", "--sft")
        return
    assert read(open_rows("org/set", "--sft")) == [("row 1", {"text": "train"})]
    assert read(open_rows("org/set:test", "--sft")) == [("row 1", {"text": "test"})]
    with pytest.raises(ConfigError, match="--sft: the data set org/set cannot be read"):
        open_rows("org/set:none", "--sft")


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sft: .*none\.csv cannot be read: No such file"):
        open_rows(str(tmp_path / "none.csv"), "--sft")
    with pytest.raises(ConfigError, match=r"it is a folder|contain any data files"):
        open_rows(str(tmp_path), "--sft")
