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

from mlx_parallm.core.tool_text import lost_result, read_arguments
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
        raise ValueError(f"{half} is half of a surrogate pair, which is no character: is it UTF-8?") from None


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


# ---- conversations in rows -----------------------------------------------------------------------
# They are read as `/v1/chat/completions` reads those of requests. The ids of calls may be left out here, as data sets
# do. A row's conversation may be JSON text, as in exports of parquet.

Message = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("name", "refusal", "tool_call_id", "reasoning_content", "reasoning")


def read_conversation(value: object) -> tuple[Message, ...] | None:
    """The messages of a list, or of its JSON text, as chat templates take them. None: the value is neither.

    Raises:
        ValueError: a message cannot be used.
        RecursionError: it is nested too deeply.
    """
    messages = _listed(value) if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        return None
    turns = tuple(map(_message, messages))
    ids = [(turn["role"], _ids(turn), turn.get("tool_call_id")) for turn in turns]
    if (index := lost_result(ids)) is not None:
        raise ValueError(f"no earlier message has the call {ids[index][2]!r}, whose result it has")
    return turns


def _listed(text: str) -> object:
    """The messages whose JSON a text is; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
        return None
    check_surrogates(value)
    return value


def _ids(turn: Message) -> list[str]:
    return [call.get("id", "") for call in turn.get("tool_calls", ())]


def _message(given: object) -> Message:
    fields = given if isinstance(given, dict) else {}
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise ValueError(f"each message needs a role, one of {', '.join(_ROLES)}")
    for name in _TEXTS:
        if not isinstance(fields.get(name), str | None):
            raise ValueError(f"{name} of a message must be text")
    given_calls = fields.get("tool_calls") or []
    if not isinstance(given_calls, list):
        raise ValueError("tool_calls of a message must be a list")
    content, calls = _content(fields.get("content")), [*map(_call, given_calls)]
    if role != "assistant" and (content is None or calls):
        raise ValueError(f"a message of the role {role} needs content" if content is None else f"{role} has tool_calls")
    turn = {
        "role": role,
        "content": content or fields.get("refusal") or "",
        "name": fields.get("name"),
        "tool_call_id": fields.get("tool_call_id"),
        "reasoning_content": fields.get("reasoning_content") or fields.get("reasoning"),
        "tool_calls": calls or None,
    }
    return {name: value for name, value in turn.items() if value is not None}


def _content(given: object) -> str | None:
    """The text of a message; of a list of text parts, one part per line."""
    if not isinstance(given, list):
        if not isinstance(given, str | None):
            raise ValueError("the content of a message must be text, or a list of text parts")
        return given
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ValueError(f"the model reads only text, and a part of the content has the type {kind!r}")
    return "\n".join(part[part["type"]] for part in given)


def _call(given: object) -> dict[str, Any]:
    call = given if isinstance(given, dict) else {}
    function = call.get("function")
    name, arguments = (function.get(key) if isinstance(function, dict) else None for key in ("name", "arguments"))
    if (
        not isinstance(name, str)
        or not isinstance(arguments, str | dict | None)
        or call.get("type") not in ("function", None)
    ):
        raise ValueError("each of tool_calls needs a function with a name, and arguments as JSON text or as an object")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    called = {"type": "function", "function": {"name": name, "arguments": read_arguments(text)}}
    return {"id": call["id"], **called} if isinstance(call.get("id"), str) else called
