"""Base classes of request bodies, queries and response objects, and the field types that several routes share.

The docstring under a field is the field's description in the OpenAPI document.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import methodcaller
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, TypeVar
from urllib.parse import quote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

Model = TypeVar("Model", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]
"""Maps names of fields to the values that have no effect; see `WireInput.NEUTRAL`."""

EMPTY: tuple[Any, ...] = ("", [], {})
"""Values that, like null, have no effect in any unsupported field."""
EMPTY_IS_LEFT_OUT = frozenset({"model", "stop"})
"""Declared fields that count as left out with an empty text too: clients send them so for the server's own. An empty
name of an adapter is refused: it must not mean the base model."""
INT32_MAX = 2**31 - 1
MAX_NAME = 160
"""Largest number of characters of the names of adapters, checkpoints, trajectories and users."""
CHOSEN_ID = re.compile(r"[ -~]{1,128}")
"""Ids of requests that clients may choose: printable ASCII."""
MAX_IGNORED, MAX_IGNORED_NAME = 20, 64
"""Largest number of unknown fields that are reported for one body, and of characters of each name."""
MISSPELLED = 0.85
"""Smallest similarity (`difflib`'s ratio) at which an unknown name counts as a misspelled known one."""
NULL = {"type": "null"}
ANNOTATIONS = ("title", "description", "default", "examples")
"""JSON Schema keywords that describe a field as a whole and not one of its alternatives."""


def refused(reason: str, field: str | int | None = None) -> PydanticCustomError:
    """The error for a validator to raise: `reason` is about the value under validation, its `field` or its item."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "field": field})


# ---- request bodies ------------------------------------------------------------------------------


@dataclass(slots=True)
class IgnoredFields:
    """Collects the unknown fields of one request body, for the `x-ignored-fields` header, the log and the metrics.

    Validation ignores unknown fields when an object of this class is its context, and refuses them without one.
    `count` is the number of all unknown fields. `names` are the first `MAX_IGNORED` different paths, without list
    indices (`messages.id`), percent-encoded and cut to `MAX_IGNORED_NAME` characters. `meant` maps those of them that
    look misspelled to the field that was probably meant. `path` leads to the object that is validated now.
    """

    count: int = 0
    names: list[str] = field(default_factory=list)
    meant: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)

    def add(self, name: str, known: Collection[str]) -> None:
        """Records an unknown field of an object whose declared fields are `known`."""
        self.count += 1
        if len(self.names) == MAX_IGNORED:
            return
        path = ".".join([*self.path, name[:MAX_IGNORED_NAME]])
        encoded = _percent_encoded(path or '""')  # an empty element would make the header malformed
        if encoded not in self.names:
            self.names.append(encoded)
            if close := difflib.get_close_matches(name[:MAX_IGNORED_NAME], known, n=1, cutoff=MISSPELLED):
                self.meant[encoded] = close[0]


def _percent_encoded(path: str) -> str:
    """`path` for a header, cut between two characters so that it can be decoded again."""
    text = ""
    for character in path:
        part = quote(character, safe="")
        if len(text) + len(part) > MAX_IGNORED_NAME:
            break
        text += part
    return text


class WireInput(BaseModel):
    """A JSON object that a client sends. A field that is null counts as left out, unless `NULL_VALUES` has a value for
    it.

    `IGNORED` names fields that clients of other servers send and that have no effect here. They take any value.
    `NEUTRAL` maps fields to the values that have no effect. A declared field with such a value counts as left out. An
    undeclared field is accepted with such a value and with null, "", [] and {}, and refused by name with any other,
    because an answer that ignored it would not be the answer that the client asked for. `INSTEAD` maps such fields to
    those that took their place. Any other undeclared field is unknown; see `IgnoredFields`.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Neutral] = {}
    INSTEAD: ClassVar[Mapping[str, str]] = {}
    NULL_VALUES: ClassVar[Mapping[str, object]] = {}

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _drop_fields_without_effect(
        cls, data: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        declared = cls._declared()
        fields: dict[str, object] = {}
        with nested(info) as ignored:
            for name, sent in data.items():
                value = cls.NULL_VALUES.get(name) if sent is None else sent
                if name not in declared:
                    cls._check_undeclared(name, value, ignored)
                elif value is not None and not _is_any_of(value, cls._left_out(name)):
                    fields[name] = value
            return handler(fields)

    @classmethod
    def _left_out(cls, name: str) -> Iterable[object]:
        """The values with which a declared field counts as left out, apart from null."""
        return (*cls.NEUTRAL.get(name, ()), *([""] if name in EMPTY_IS_LEFT_OUT else []))

    @classmethod
    def _check_undeclared(cls, name: str, value: object, ignored: IgnoredFields | None) -> None:
        """Raises the error of `refused` unless the field may be sent with this value. Records an unknown field."""
        if name in cls.IGNORED:
            return
        empty = value is None or _is_any_of(value, EMPTY)
        if name in cls.NEUTRAL:
            if not empty and not _is_any_of(value, cls.NEUTRAL[name]):
                instead = f"send {cls.INSTEAD[name]}" if name in cls.INSTEAD else "leave it out"
                raise refused(f"not supported by this server; {instead}", name)
        elif ignored is None:
            close = difflib.get_close_matches(name[:100], cls._declared(), n=1)
            advice = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise refused(f"unknown field; {advice}", name[:100])
        elif not empty:
            ignored.add(name, cls._declared())

    @classmethod
    @cache
    def _declared(cls) -> Mapping[str, bool]:
        """The declared fields by the names that clients send, and whether each is required."""
        return {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core_schema)
        fields: dict[str, Any] = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, required in cls._declared().items():
            if not required and NULL not in fields[name].get("anyOf", ()):
                about = {key: fields[name].pop(key) for key in ANNOTATIONS if key in fields[name]}
                fields[name] = {"anyOf": [fields[name], NULL], **about}
        fields |= {name: {"description": "Accepted with any value and ignored."} for name in sorted(cls.IGNORED)}
        unsupported = "Not supported. Only values that have no effect are accepted."
        for name, neutral in cls.NEUTRAL.items():
            if name in cls._declared():
                fields[name]["anyOf"].append({"enum": list(neutral)})
            else:
                fields[name] = {"enum": [*neutral, *EMPTY, None], "description": unsupported}
        return schema


class OpenBody(WireInput):
    """The body of a route that other servers have too, so that clients may send fields which this server does not know.
    Unknown fields are ignored, unless the server runs with strict fields or the body has `collect_trajectory`."""


def read_nested(model: type[Model], value: object, info: ValidationInfo) -> Model:
    """Validates `value` from within a validator of a field, so that its unknown fields count as the body's own."""
    with nested(info):
        return model.model_validate(value, context=info.context)


def ignored_part(name: str, info: ValidationInfo) -> bool:
    """Records that a part of a field's value is left out, as unknown fields are. False where these are refused."""
    with nested(info) as ignored:
        if ignored is not None:
            ignored.add(name, ())
        return ignored is not None


@contextmanager
def nested(info: ValidationInfo) -> Iterator[IgnoredFields | None]:
    """The collector of unknown fields, or None where they are refused. In the block, the paths of added fields start
    with the field that `info` belongs to."""
    ignored = info.context if isinstance(info.context, IgnoredFields) else None
    if ignored is None or info.field_name is None:
        yield ignored
        return
    ignored.path.append(info.field_name)
    try:
        yield ignored
    finally:
        ignored.path.pop()


def _is_any_of(value: object, neutral: Iterable[object]) -> bool:
    """Whether `value` is in `neutral`. true and 1 differ, as do false and 0."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in neutral)


class WireQuery(BaseModel):
    """The query of a URL. Undeclared names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


# ---- token ids -----------------------------------------------------------------------------------


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    """Whether `value` is a non-empty list of integers from 0 to 2^31 - 1."""
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= INT32_MAX for t in value)


def _token_ids(value: object) -> list[int]:
    if value == [] or is_token_ids(value):
        return value
    raise refused("must be a list of token ids")


def _non_empty_token_ids(value: object) -> list[int]:
    if is_token_ids(value):
        return value
    raise refused("must be a list of at least one token id")


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[TokenId])]
NonEmptyTokenIds = Annotated[
    list[int],
    PlainValidator(_non_empty_token_ids, json_schema_input_type=Annotated[list[TokenId], Field(min_length=1)]),
]

# ---- response objects ----------------------------------------------------------------------------

FinishReasonText = Literal["stop", "length", "repetition"]
"""`repetition`: the answer repeated itself without end."""

Numbers = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "number"}})]
"""A list of numbers, or a NumPy vector in an object that is `LONG`: it becomes a list, which takes more memory, only
when its piece of the answer is written."""


class WireOutput(BaseModel):
    """A JSON object that the server sends. Fields that were not set are left out, not null."""

    LONG: ClassVar[bool] = False
    """Whether one of the fields may be very long."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @property
    def event_name(self) -> str:
        """The `event` field of the object in an SSE stream, or "" for a stream whose events are all of one kind."""
        return ""

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def json_pieces(self) -> Iterator[str]:
        """The same text as `json_text`, in short pieces. An object that is not `LONG` is one piece."""
        if self.LONG:
            is_set = (name for name in type(self).model_fields if name in self.model_fields_set)
            yield from _object_pieces((name, getattr(self, name)) for name in is_set)
        else:
            yield self.json_text()


class WireList(WireOutput):
    """A JSON list that the server sends."""

    LONG: ClassVar[bool] = True

    items: Sequence[WireOutput]
    """The objects of the list."""

    def json_text(self) -> str:
        return "".join(self.json_pieces())

    def json_pieces(self) -> Iterator[str]:
        yield from _pieces(list(self.items))


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
        yield to_json(value, fallback=methodcaller("tolist")).decode()


def _object_pieces(fields: Iterable[tuple[str, object]]) -> Iterator[str]:
    yield "{"
    for place, (name, value) in enumerate(fields):
        yield f"{',' if place else ''}{to_json(name).decode()}:"
        yield from _pieces(value)
    yield "}"
