"""Logs on stderr: plain text, or one JSON object on each line.

    text  INFO mlx_parallm.rl.events: an update of tone was skipped: no_signal
    json  {"time":"2026-01-31T12:00:00.000+00:00","level":"info","logger":"mlx_parallm.rl.events","message":"an …"}

A line of JSON also has the fields of `log_context`, by which a collector finds all lines of one request.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"
MAX_FRAMES, MAX_STACK, MAX_MESSAGE = 20, 8_000, 2_000
"""The most frames of each exception's stack, and the most characters of all stacks, and of a message."""

log_context: ContextVar[Callable[[], Mapping[str, Any]]] = ContextVar("log_context", default=dict)
"""A function that returns the fields of the request that is being answered: its id and so on."""


@dataclass(frozen=True, slots=True)
class StructuredMessage:
    """A message that is fields. `summary` says the same in words, and stands for it in lines of JSON.

    Pass it to a logger in place of a text. As a text, it is the JSON of its fields.
    """

    summary: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return _json(self.fields)


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON. An exception is part of the line; its stack is cut at the older end."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        line = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message.summary if isinstance(message, StructuredMessage) else record.getMessage().strip(),
            **log_context.get()(),
        }
        line["message"] = line["message"][:MAX_MESSAGE]
        if isinstance(message, StructuredMessage):
            line |= message.fields
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line |= _exception_fields(error)
        return _json(line)


class StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is now, so that a live view can have the lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - a log that cannot be written stops nothing
            self.handleError(record)


def set_up(level: str, as_json: bool, shown: tuple[str, ...] = ()) -> None:
    """Writes records of at least this level to stderr, unless the program has configured logging already.

    Args:
        as_json: as lines of JSON, and so are warnings of Python.
        shown: loggers whose records the program shows by itself, so that they are not written as text.
    """
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORMAT))
    if not as_json:
        handler.addFilter(lambda record: record.name not in shown)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(as_json)
    for name in ("httpx", "matplotlib"):  # they log every request to another server, and fonts, at level info
        logging.getLogger(name).setLevel(logging.WARNING)


def timestamp(seconds: float) -> str:
    """Unix time as text: in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _exception_fields(error: BaseException) -> dict[str, str]:
    stack = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))
    return {"exception": f"{type(error).__name__}: {error}"[:MAX_MESSAGE], "stack": stack[-MAX_STACK:]}


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), default=str)
