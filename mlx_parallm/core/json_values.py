"""How answers show what JSON does not have: times, versions, and numbers that are not finite.

Cards of the core are answers, or parts of them. pydantic reads this from their types; it is not imported here, because
child processes that need no HTTP start without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any


def _name_in_answers(field: str) -> str:
    return "lora_adapter" if field == "adapter" else field


ANSWER = {
    "use_attribute_docstrings": True,
    "json_schema_serialization_defaults_required": True,
    "alias_generator": _name_in_answers,
    "populate_by_name": True,
}
"""pydantic's configuration of cards: the docstrings below their fields are in the OpenAPI document, which says that all
fields are sent; and `adapter` is called `lora_adapter`."""


@dataclass(frozen=True, slots=True)
class ShownAs:
    """Answers show a value of the annotated type as what `show` returns, which is of the type `kind`."""

    show: Callable[[Any], Any]
    kind: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import PlainSerializer

        return PlainSerializer(self.show, return_type=self.kind).__get_pydantic_core_schema__(source, handler)


def utc(seconds: float) -> str:
    """Unix seconds as ISO-8601, to the millisecond: `2026-11-03T12:00:00.250Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(value: float | None) -> float | None:
    """None for a number that is not finite."""
    return None if value is None or not math.isfinite(value) else value


UnixTime = Annotated[float, ShownAs(utc, str)]
"""Seconds; a text in answers."""
Figure = Annotated[float, ShownAs(finite, float | None)]
"""A number that may be infinite or NaN; null in answers then."""
