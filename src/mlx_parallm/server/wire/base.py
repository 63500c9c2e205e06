"""What all wire models share: strict types, null means left out, and what becomes of unknown fields.

The docstring under a field is its description in the OpenAPI document.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from mlx_parallm.server.wire.ignored import IgnoredFields
from mlx_parallm.server.wire.neutral import EMPTY, Neutral

Read = TypeVar("Read", covariant=True)

NULL = {"type": "null"}
ABOUT = ("title", "description", "default", "examples")
"""What a schema says of a field, whichever of its alternatives is sent."""


def refused(reason: str, field: str | None = None) -> PydanticCustomError:
    """A fault of the value being validated, or of `field` in it."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "field": field})


def _same(value: object, neutral: object) -> bool:
    """Equality that tells true from 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _asks_for_nothing(value: object, neutral: Iterable[object] = ()) -> bool:
    return value is None or any(_same(value, nothing) for nothing in (*EMPTY, *neutral))


class WireInput(BaseModel):
    """A JSON object a client sends; null means left out.

    `IGNORED`: fields real clients send that change nothing here, taken with any value and not read.
    `NEUTRAL`: fields that are known and not served, with the values that ask for nothing; any other value is refused
    (see `wire.neutral`). Of a declared field, these are the values that mean left out.
    Any other field is unknown. It is refused by name, unless the context of the validation is an `IgnoredFields`,
    which collects it then.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Neutral] = {}

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        with _inside(info) as ignored:
            return handler({name: value for name, value in data.items() if cls._counts(name, value, ignored)})

    @classmethod
    def _counts(cls, name: str, value: object, ignored: IgnoredFields | None) -> bool:
        neutral = cls.NEUTRAL.get(name, ())
        if name in cls._names():
            return value is not None and not any(_same(value, nothing) for nothing in neutral)
        if name in cls.IGNORED:
            return False
        if name in cls.NEUTRAL:
            if _asks_for_nothing(value, neutral):
                return False
            raise refused("not supported by this server; leave it out", name)
        if ignored is None:
            raise refused(cls._unknown(name), name[:100])
        if not _asks_for_nothing(value):
            ignored.add(name, cls._names())
        return False

    @classmethod
    @cache
    def _names(cls) -> Mapping[str, bool]:
        """Of the fields as they are sent, and whether they must be."""
        return {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}

    @classmethod
    def _unknown(cls, name: str) -> str:
        close = difflib.get_close_matches(name[:100], cls._names(), n=1)
        return f"unknown field; did you mean {close[0]!r}?" if close else "unknown field; leave it out"

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core_schema)
        fields: dict[str, Any] = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, required in cls._names().items():
            if not required and NULL not in fields[name].get("anyOf", ()):
                about = {key: fields[name].pop(key) for key in ABOUT if key in fields[name]}
                fields[name] = {"anyOf": [fields[name], NULL], **about}
        fields |= {name: {"description": "Taken with any value, and not read."} for name in sorted(cls.IGNORED)}
        only = "Not supported: taken only with a value that asks for nothing."
        for name, neutral in cls.NEUTRAL.items():
            if name in cls._names():
                fields[name]["anyOf"].append({"enum": list(neutral)})
            else:
                fields[name] = {"enum": [*neutral, *EMPTY, None], "description": only}
        return schema


class OpenBody(WireInput):
    """The body of a route that clients of other servers call too, with fields of their own: those that are unknown are
    ignored, unless the operator wants them refused or the request is trained on."""


class Validate(Protocol[Read]):
    """`Model.model_validate`, or a `TypeAdapter`'s `validate_python`."""

    def __call__(self, value: Any, /, *, context: Any) -> Read: ...


def read_nested(validate: Validate[Read], value: object, info: ValidationInfo) -> Read:
    """What `validate` makes of `value`, in a validator of a field: its unknown fields are those of the whole body."""
    with _inside(info):
        return validate(value, context=info.context)


@contextmanager
def _inside(info: ValidationInfo) -> Iterator[IgnoredFields | None]:
    """What collects unknown fields while the block validates what `info` is of; None: nothing does."""
    ignored = info.context if isinstance(info.context, IgnoredFields) else None
    with nullcontext() if ignored is None else ignored.inside(info.field_name):
        yield ignored


class WireQuery(BaseModel):
    """The query of a URL. A name that the model does not declare is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class WireOutput(BaseModel):
    """A JSON object we send. Written with `exclude_unset`: a field that was never given is absent, not null."""

    LONG: ClassVar[bool] = False
    """Whether one of its fields may be very long."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @property
    def event_name(self) -> str:
        """What the event of a stream that this is is named; empty where a stream has one kind alone."""
        return ""

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def json_pieces(self) -> Iterator[str]:
        """The text of `json_text` in short pieces. An object that is not `LONG` is one piece."""
        if self.LONG:
            given = (name for name in type(self).model_fields if name in self.model_fields_set)
            yield from _object_pieces((name, getattr(self, name)) for name in given)
        else:
            yield self.json_text()


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, WireOutput):
        yield from value.json_pieces()
    elif isinstance(value, list):
        yield "["
        for place, item in enumerate(value):
            yield "," if place else ""
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield from _object_pieces(value.items())
    else:
        yield to_json(value).decode()


def _object_pieces(fields: Iterable[tuple[str, object]]) -> Iterator[str]:
    yield "{"
    for place, (name, value) in enumerate(fields):
        yield f"{',' if place else ''}{to_json(name).decode()}:"
        yield from _pieces(value)
    yield "}"
