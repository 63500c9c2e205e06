"""A choice's text taken apart: what was thought, what is said, which tools are called.

A `Part` is what one step adds to one of the three. The parts of a choice, joined, are the same however its text was cut
into pieces, so that a stream equals the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call number `position` of a choice. Its first part has `call_id` and `name`; the `arguments` of all its
    parts, joined, are JSON text, or its beginning where the call is not `complete`: the text was cut off inside it."""

    position: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """At most one of the three is there."""

    reasoning: str = ""
    text: str = ""
    call: CallPart | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """Parts of one choice, joined by kind; `calls` in order of position."""

    reasoning: str
    text: str
    calls: tuple[CallPart, ...]

    @property
    def content(self) -> str | None:
        """The text; None where there is something else instead of it."""
        return self.text or (None if self.reasoning or self.calls else "")


def told(parts: Iterable[Part]) -> Told:
    parts = tuple(parts)
    calls: dict[int, CallPart] = {}
    for part in parts:
        if part.call is not None:
            calls[part.call.position] = _more(calls.get(part.call.position), part.call)
    reasoning, text = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
    return Told(reasoning, text, tuple(calls[position] for position in sorted(calls)))


def _more(before: CallPart | None, call: CallPart) -> CallPart:
    if before is None:
        return call
    arguments = before.arguments + call.arguments
    return CallPart(call.position, arguments, before.call_id, before.name, before.complete and call.complete)
