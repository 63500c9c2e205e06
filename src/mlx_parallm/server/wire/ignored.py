"""The unknown fields of one request body: which of them the client is told about."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from urllib.parse import quote

MAX_NAMES, MAX_NAME = 20, 64
MISTYPED = 0.85
"""Likeness from which an unknown name is taken for a known one with a mistake in it."""


class IgnoredFields:
    """Collects the fields that a body has and no model declares. The context of a validation that ignores them.

    `count` is of all of them, `names` are the first `MAX_NAMES` different ones: their paths without positions in lists
    (`messages.id`), percent-encoded, of at most `MAX_NAME` characters. `meant` has, for those of them that look like a
    mistake, the field that was probably meant.
    """

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        self.meant: dict[str, str] = {}
        self._path: list[str] = []

    @contextmanager
    def inside(self, field: str | None) -> Iterator[None]:
        """While the block runs, names are those of fields in `field`; None: no deeper than before."""
        if field is None:
            yield
            return
        self._path.append(field)
        try:
            yield
        finally:
            self._path.pop()

    def add(self, name: str, known: Collection[str]) -> None:
        """`known`: the fields that the same object may have."""
        self.count += 1
        if len(self.names) == MAX_NAMES:
            return
        path = ".".join([*self._path, name[:MAX_NAME]])
        encoded = _encoded(path or '""')  # an empty element would make the header malformed
        if encoded not in self.names:
            self.names.append(encoded)
            if close := difflib.get_close_matches(name[:MAX_NAME], known, n=1, cutoff=MISTYPED):
                self.meant[encoded] = close[0]


def _encoded(path: str) -> str:
    """Cut between two characters, so that every name can be decoded again."""
    text = ""
    for character in path:
        part = quote(character, safe="")
        if len(text) + len(part) > MAX_NAME:
            break
        text += part
    return text
