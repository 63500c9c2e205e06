"""The field of an answer that names its repaired tool calls."""

from __future__ import annotations

from typing import Any

from mlx_parallm.core.splitter import Splitter
from mlx_parallm.core.text import RepairKind
from mlx_parallm.server.api.fields import WireOutput


class RepairedCall(WireOutput):
    """A tool call that was not valid in the form of the model's family, and could only mean one thing."""

    position: int
    """The call's position in the answer."""
    kind: RepairKind
    """What was wrong: `form`, it was in another family's form; `end`, its end was missing, or a bracket was closed
    twice; `quotes`, a quote, a comma or a line break made its JSON invalid; `fence`, it was in a fenced block."""


def repaired_fields(splitter: Splitter) -> dict[str, Any]:
    """The answer's field that names the repaired calls; none if no call was repaired."""
    repaired = [RepairedCall(position=position, kind=kind) for position, kind in splitter.repaired]
    return {"repaired_tool_calls": repaired} if repaired else {}
