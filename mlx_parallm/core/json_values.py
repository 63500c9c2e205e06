"""How answers show what JSON does not have: times, versions, and numbers that are not finite; and which fields of a
record they leave out.

Cards of the core are answers, or parts of them. pydantic reads this from their types; it is not imported here, because
child processes that need no HTTP start without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import Annotated, Any


def _name_in_answers(field: str) -> str:
    return "lora_adapter" if field == "adapter" else field


def _describe_inherited(schema: dict[str, Any], card: type[Any]) -> None:
    """Describes fields that a card inherits as the card does that declares them."""
    from pydantic import TypeAdapter

    for base in filter(is_dataclass, card.__bases__):
        declared = TypeAdapter(base).json_schema(mode="serialization")["properties"]
        for name, field in schema["properties"].items():
            if "description" in declared.get(name, ()):
                field.setdefault("description", declared[name]["description"])


ANSWER = {
    "use_attribute_docstrings": True,
    "json_schema_serialization_defaults_required": True,
    "alias_generator": _name_in_answers,
    "populate_by_name": True,
    "defer_build": True,
    "json_schema_extra": _describe_inherited,
}
"""pydantic's configuration of cards: the docstrings below their fields are in the OpenAPI document, which says that all
fields are sent; and `adapter` is called `lora_adapter`. Schemas are built when they are needed: reading the docstrings
takes time, which a start need not wait for."""

NOT_SENT = {"exclude": True}
"""The metadata of a card's field that answers do not have, which only the process itself reads."""


def sent_as(name: str) -> dict[str, Any]:
    """The metadata of a card's field that has another name in answers."""
    return {"alias": name}


def fields_of(card: Any) -> dict[str, Any]:
    """The fields of a card by name, for a card that has more."""
    return {field.name: getattr(card, field.name) for field in fields(card)}


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


def as_json(value: Any) -> Any:
    """Makes `value` fit JSON: numbers that are not finite become null, and objects of other types become strings."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)


UnixTime = Annotated[float, ShownAs(utc, str)]
"""Seconds; a text in answers."""
Figure = Annotated[float, ShownAs(finite, float | None)]
"""A number that may be infinite or NaN; null in answers then."""
JsonObject = Annotated[Mapping[str, Any], ShownAs(as_json, dict[str, Any])]
"""Values of any types by name; see `as_json`."""
