"""How the objects of a stream become bytes: as server-sent events, or as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_parallm.server.api.fields import WireOutput


@dataclass(frozen=True, slots=True)
class Framing:
    """One form of a stream.

    Attributes:
        content_type: the header of the response.
        write: the text of one object, whose kind and id may be named.
        comment: the text that keeps a silent stream open and that clients skip. Empty: the form has none.
        end: the last text of the stream.
    """

    content_type: str
    write: Callable[[WireOutput, str, str], str]
    comment: str = ""
    end: str = ""


def _event(data: WireOutput, kind: str, event_id: str) -> str:
    """Its `event` field is `kind` or the `event_name` of `data`, if either is given."""
    kind = kind or data.event_name
    name = f"event: {kind}\n" if kind else ""
    last = f"id: {event_id}\n" if event_id else ""
    return f"{last}{name}data: {data.json_text()}\n\n"


def _line(data: WireOutput, _kind: str, _id: str) -> str:
    return f"{data.json_text()}\n"


EVENTS = Framing("text/event-stream; charset=utf-8", _event, comment=": ping\n\n")
OPENAI_EVENTS = replace(EVENTS, end="data: [DONE]\n\n")
"""The events of OpenAI's completions, whose streams end with a word."""
JSON_LINES = Framing("application/x-ndjson", _line)
