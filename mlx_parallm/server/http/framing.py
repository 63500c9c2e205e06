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
        write: the text of one object.
        comment: the text that keeps a silent stream open and that clients skip. Empty: the form has none.
        end: the last text of the stream.
    """

    content_type: str
    write: Callable[[WireOutput], str]
    comment: str = ""
    end: str = ""


def sent_event(json: str, kind: str = "", event_id: str = "") -> str:
    """A server-sent event. Those of a stream may have kinds and ids."""
    name = f"event: {kind}\n" if kind else ""
    last = f"id: {event_id}\n" if event_id else ""
    return f"{last}{name}data: {json}\n\n"


def _event(data: WireOutput) -> str:
    return sent_event(data.json_text(), data.event_name)


def _line(data: WireOutput) -> str:
    return f"{data.json_text()}\n"


EVENTS = Framing("text/event-stream; charset=utf-8", _event, comment=": ping\n\n")
OPENAI_EVENTS = replace(EVENTS, end="data: [DONE]\n\n")
"""The events of OpenAI's completions, whose streams end with a word."""
JSON_LINES = Framing("application/x-ndjson", _line)
