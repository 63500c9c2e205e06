"""Files of rows to train on, after a line with the end of their name: each row is an example, or says why not."""

import json
import logging
import tempfile
from pathlib import Path

from fuzz.mutation import after_first_line, bytes_mutated, json_with

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.files.forms import FileKind, read_example
from mlx_parallm.extras.files.rows import open_rows
from mlx_parallm.rl.task_files import read_rows

logging.disable(logging.WARNING)
ENDS = ("jsonl", "json", "csv", "tsv", "parquet")
MOST_ROWS = 2000
"""Rows that are read, because each is read by itself."""
FIELDS = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "chosen",
    "rejected",
    "preferred_output",
    "tools",
    "non_preferred_output",
    "label",
    "weight",
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "tool_call_id",
    "function",
    "name",
    "arguments",
    "system",
]
of_row = json_with(FIELDS, ("user", "assistant", "system", "tool", "human", "gpt", "0", "true", [{"role": "user"}]))


def of_rows(data, rng):
    if data[:1] not in b"{[" or not rng.randrange(4):
        return bytes_mutated(data, rng)
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    return b"\n".join([*lines[:at], of_row(lines[at], rng), *lines[at + 1 :]])


mutated = after_first_line(of_rows, ENDS[:4])


def run(data):
    end, _, content = data.partition(b"\n")
    end = end.decode(errors="replace")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"rows.{end if end in ENDS else 'jsonl'}"
        path.write_bytes(content)
        try:
            if path.suffix in (".jsonl", ".parquet"):
                found, unusable = read_rows(path, dict)
                assert all(isinstance(row, dict) for row in found.values())
                assert all(isinstance(why, str) for why in unusable)
            rows = open_rows(str(path), "file")
        except ConfigError:
            return
        for number in range(min(len(rows), MOST_ROWS)):
            rows.place(number)
            for kind in FileKind:
                try:
                    example = read_example(rows.read(number), kind)
                except (ValueError, RecursionError):
                    continue
                json.dumps([example.prompt, example.answers, example.tools]).encode()
                assert example.question
