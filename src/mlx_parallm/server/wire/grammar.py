"""What an answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from mlx_parallm.core import GrammarKind, GrammarSpec
from mlx_parallm.server.wire.base import OpenBody, WireInput, refused
from mlx_parallm.server.wire.neutral import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, Neutral

MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 128 * 1024, 64
MAX_REGEX, MAX_GRAMMAR = 8 * 1024, 64 * 1024
MAX_CHOICES, MAX_CHOICE = 1024, 1024
MAX_SCHEMA_NAME, MAX_DESCRIPTION = 64, 4096

ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def shallow(value: object, levels: int) -> bool:
    """Whether nothing in it lies deeper than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(shallow(part, levels - 1) for part in inner)


def checked_schema(value: object) -> dict[str, Any] | bool:
    """A JSON schema that is neither too deep nor too long; raises what `refused` makes."""
    if not isinstance(value, dict | bool):
        raise refused("must be a JSON schema: an object, true or false")
    if not shallow(value, MAX_SCHEMA_DEPTH):
        raise refused(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if len(json.dumps(value)) > MAX_SCHEMA_BYTES:
        raise refused(f"is longer than {MAX_SCHEMA_BYTES} characters as JSON")
    return value


def _schema_or_text(value: object) -> dict[str, Any] | bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise refused("is no JSON") from None
    return checked_schema(value)


_SCHEMA_FORM = dict[str, Any] | bool
Schema = Annotated[_SCHEMA_FORM, PlainValidator(checked_schema, json_schema_input_type=_SCHEMA_FORM)]
SchemaOrText = Annotated[_SCHEMA_FORM, PlainValidator(_schema_or_text, json_schema_input_type=_SCHEMA_FORM | str)]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX)]
Choice = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE)]], Field(min_length=1, max_length=MAX_CHOICES)
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


class NamedSchema(WireInput):
    """A JSON schema and its name."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_NAME, pattern="^[a-zA-Z0-9_-]+$")]
    """Letters, digits, _ and -."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """Not read."""
    schema_: Schema = Field(default=True, alias="schema")
    """A JSON schema of at most 128 KiB and 64 levels; left out: any JSON."""
    strict: bool = False
    """Changes nothing: it is enforced either way."""


class ResponseFormat(WireInput):
    """OpenAI's."""

    NEUTRAL: ClassVar[Neutral] = RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    """`text`: as the model likes. `json_object`: one JSON object. `json_schema`: what the schema allows."""
    json_schema: NamedSchema | None = None
    """Goes with the type json_schema, and only with it."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused('goes with type "json_schema", and only with it', "json_schema")
        return self

    def specs(self) -> Iterator[tuple[str, GrammarSpec]]:
        if self.type == "json_object":
            yield "response_format", ANY_OBJECT
        if self.json_schema is not None:
            yield "response_format", of_schema(self.json_schema.schema_)


class StructuredOutputs(WireInput):
    """vLLM's: exactly one of the forms."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"disable_fallback", "disable_any_whitespace"})
    NEUTRAL: ClassVar[Neutral] = STRUCTURED_OUTPUTS

    json_: SchemaOrText | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: Regex | None = None
    """What the whole answer must match."""
    choice: Choice | None = None
    """Texts, one of which is the answer."""
    grammar: GrammarText | None = None
    """GBNF or Lark."""
    json_object: bool = False
    """True: any JSON object."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(list(self.specs("structured_outputs"))) != 1:
            raise refused("must have exactly one of json, regex, choice, grammar and json_object: true")
        return self

    def specs(self, param: str) -> Iterator[tuple[str, GrammarSpec]]:
        yield from forms(param, self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            yield param, ANY_OBJECT


class StructuredBody(OpenBody):
    """The fields of a request that say what its answers must look like: one of them at the most."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"guided_decoding_backend"})

    response_format: ResponseFormat | None = None
    """OpenAI's form."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's form."""
    guided_json: SchemaOrText | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Regex | None = None
    """Older name of `structured_outputs.regex`."""
    guided_choice: Choice | None = None
    """Older name of `structured_outputs.choice`."""
    guided_grammar: GrammarText | None = None
    """Older name of `structured_outputs.grammar`."""

    @model_validator(mode="after")
    def _at_most_one_grammar(self) -> Self:
        named = [param for param, _ in self._grammars()]
        if len(named) > 1:
            raise refused(f"goes not with {named[0]}: send one of them", named[1])
        return self

    @property
    def grammar(self) -> tuple[str, GrammarSpec] | None:
        """What the answers must follow, and the field that says so; None: nothing."""
        return next(self._grammars(), None)

    @property
    def compiles(self) -> bool:
        """Whether a grammar has to be compiled before it can be answered."""
        return self.grammar is not None

    def _grammars(self) -> Iterator[tuple[str, GrammarSpec]]:
        if self.response_format is not None:
            yield from self.response_format.specs()
        if self.structured_outputs is not None:
            yield from self.structured_outputs.specs("structured_outputs")
        yield from forms("guided_json", self.guided_json, None, None, None)
        yield from forms("guided_regex", None, self.guided_regex, None, None)
        yield from forms("guided_choice", None, None, self.guided_choice, None)
        yield from forms("guided_grammar", None, None, None, self.guided_grammar)


def forms(
    param: str, schema: _SCHEMA_FORM | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, GrammarSpec]]:
    """Each grammar that is there, with the field that names it."""
    if schema is not None:
        yield param, of_schema(schema)
    if regex is not None:
        yield param, GrammarSpec(GrammarKind.REGEX, regex)
    if choice is not None:
        yield param, GrammarSpec(GrammarKind.CHOICE, json.dumps(choice))
    if grammar is not None:
        yield param, GrammarSpec(GrammarKind.GRAMMAR, grammar)


def of_schema(schema: _SCHEMA_FORM) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({} if schema is True else schema))
