"""A choice's text taken apart: what was thought, what is said, which tools are called.

A `Part` is what one step adds to one of the three. The parts of a choice, joined, are the same however its text was cut
into pieces, so that a stream equals the whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call number `position` of a choice. Its first part has `call_id` and `name`; the `arguments` of all its
    parts, joined, are JSON text."""

    position: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """At most one of the three is there."""

    reasoning: str = ""
    text: str = ""
    call: CallPart | None = None
