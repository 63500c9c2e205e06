"""The request fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, PrivateAttr, model_validator

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.core.schemas import unknown_format
from mlx_parallm.server.api.fields import Neutral, OpenBody, WireInput, refused

MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 128 * 1024, 64
MAX_REGEX, MAX_GRAMMAR = 8 * 1024, 64 * 1024
MAX_CHOICES, MAX_CHOICE = 1024, 1024
MAX_SCHEMA_NAME, MAX_DESCRIPTION = 64, 4096

ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
JsonSchema = dict[str, Any] | bool


def is_shallow(value: object, levels: int) -> bool:
    """Whether lists and objects in `value` are nested at most `levels` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(is_shallow(part, levels - 1) for part in inner)


def checked_schema(value: object) -> JsonSchema:
    """Returns `value` if it is a JSON schema of bounded depth and size, and raises the error of `refused` otherwise."""
    if not isinstance(value, dict | bool):
        raise refused("must be a JSON schema: an object, true or false")
    if not is_shallow(value, MAX_SCHEMA_DEPTH):
        raise refused(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if len(json.dumps(value)) > MAX_SCHEMA_BYTES:
        raise refused(f"is longer than {MAX_SCHEMA_BYTES} characters as JSON")
    return value


def _schema_or_text(value: object) -> JsonSchema:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise refused("is not valid JSON") from None
    return checked_schema(value)


Schema = Annotated[JsonSchema, PlainValidator(checked_schema, json_schema_input_type=JsonSchema)]
SchemaOrText = Annotated[JsonSchema, PlainValidator(_schema_or_text, json_schema_input_type=JsonSchema | str)]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE)]], Field(min_length=1, max_length=MAX_CHOICES)
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


def _schema_spec(schema: JsonSchema) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({} if schema is True else schema))


SPECS: Mapping[str, Callable[[Any], GrammarSpec]] = {
    "json": _schema_spec,
    "regex": lambda regex: GrammarSpec(GrammarKind.REGEX, regex),
    "choice": lambda choices: GrammarSpec(GrammarKind.CHOICE, json.dumps(choices)),
    "grammar": lambda source: GrammarSpec(GrammarKind.GRAMMAR, source),
}
"""Maps the name of each way that vLLM has to write a grammar to a function that makes a `GrammarSpec`."""
WAYS: Mapping[str, str] = {f"guided_{way}": way for way in SPECS} | {"regex": "regex", "ebnf": "grammar"}
"""Maps vLLM's older fields and SGLang's to the names in `SPECS`."""


class NamedSchema(WireInput):
    """A JSON schema with a name."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_NAME, pattern="^[a-zA-Z0-9_-]+$")]
    """Letters, digits, _ and -."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """Accepted and ignored."""
    schema_: Schema = Field(default=True, alias="schema")
    """A JSON schema of at most 128 KiB and 64 levels. If it is left out, any JSON is allowed."""
    strict: bool = False
    """Whether formats of texts that are not enforced are refused. All else of the schema is always enforced."""

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.strict and (name := unknown_format(self.schema_)):
            raise refused(f"the format {name!r} is not enforced; leave it out, or send strict false", "schema")
        return self


class ResponseFormat(WireInput):
    """OpenAI's structured output."""

    NEUTRAL: ClassVar[Neutral] = {"schema": ()}

    type: Literal["text", "json_object", "json_schema"]
    """`text` is free text, `json_object` any JSON object, `json_schema` JSON that follows the schema."""
    json_schema: NamedSchema | None = None
    """Required with the type json_schema, and refused with any other."""

    @model_validator(mode="after")
    def _check_schema_goes_with_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused('is required with type "json_schema", and refused with any other', "json_schema")
        return self

    @property
    def spec(self) -> GrammarSpec | None:
        """The grammar of the answer, or None for free text."""
        if self.json_schema is not None:
            return _schema_spec(self.json_schema.schema_)
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(WireInput):
    """vLLM's structured output: exactly one of the fields is set."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"disable_fallback", "disable_any_whitespace"})
    NEUTRAL: ClassVar[Neutral] = {
        "disable_additional_properties": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_: SchemaOrText | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: Regex | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """A list of texts. The answer is one of them."""
    grammar: GrammarText | None = None
    """A grammar in GBNF or Lark."""
    json_object: bool = False
    """Whether the answer is any JSON object."""

    @model_validator(mode="after")
    def _check_one_is_set(self) -> Self:
        if len(self._all()) != 1:
            raise refused("must have exactly one of json, regex, choice, grammar and json_object: true")
        return self

    @property
    def spec(self) -> GrammarSpec:
        return self._all()[0]

    def _all(self) -> list[GrammarSpec]:
        given = zip(SPECS.values(), (self.json_, self.regex, self.choice, self.grammar), strict=True)
        specs = [spec_of(value) for spec_of, value in given if value is not None]
        return [*specs, ANY_OBJECT] if self.json_object else specs


class StructuredBody(OpenBody):
    """The fields that ask for structured output. A request may use one of them, or several that ask for the same."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"guided_decoding_backend"})

    response_format: ResponseFormat | None = None
    """OpenAI's structured output."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's structured output."""
    guided_json: SchemaOrText | None = None
    """vLLM's older name for `structured_outputs.json`."""
    guided_regex: Regex | None = None
    """vLLM's older name for `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """vLLM's older name for `structured_outputs.choice`."""
    guided_grammar: GrammarText | None = None
    """vLLM's older name for `structured_outputs.grammar`."""
    regex: Regex | None = None
    """SGLang's name for `structured_outputs.regex`."""
    ebnf: GrammarText | None = None
    """SGLang's name for `structured_outputs.grammar`."""

    _grammar: tuple[str, GrammarSpec] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _read_grammar(self) -> Self:
        formats = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        found = [(name, spec) for name, part in formats.items() if part is not None and (spec := part.spec) is not None]
        found += [(name, SPECS[way](value)) for name, way in WAYS.items() if (value := getattr(self, name)) is not None]
        if other := next((name for name, spec in found if spec != found[0][1]), None):
            raise refused(f"cannot be combined with {found[0][0]}: send one of them", other)
        self._grammar = found[0] if found else None
        return self

    @property
    def grammar(self) -> tuple[str, GrammarSpec] | None:
        """The field that asks for structured output and the grammar of the answers, or None for free text."""
        return self._grammar

    @property
    def compiles(self) -> bool:
        """Whether a grammar has to be compiled for this request."""
        return self._grammar is not None
