"""While a library scores text from outside, no text is run as code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


class TextAsCodeError(Exception):
    """Something called eval or exec with text."""


class _State:
    closed = False
    refused = 0


@contextmanager
def no_code_from_text() -> Iterator[None]:
    """In the block eval and exec of text raise TextAsCodeError, in this process: one thread only.

    Many tasks of reasoning-gym evaluate an answer, or a field of the entry, both of which a client can write.
    Code of files still runs, so imports work; a module that makes a dataclass must be imported before.
    """
    _install()
    _State.closed = True
    try:
        yield
    finally:
        _State.closed = False


def refusals() -> int:
    """How often text was refused so far; the library may have caught the error."""
    return _State.refused


@cache
def _install() -> None:
    sys.addaudithook(_audit)  # there is no way to remove it


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _State.closed or event != "exec":
        return
    origin = str(getattr(arguments[0], "co_filename", "<unknown>"))
    if origin.startswith("<") and not origin.startswith("<frozen "):
        _State.refused += 1
        raise TextAsCodeError("text is not run as code here")
