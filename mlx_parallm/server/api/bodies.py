"""The request fields that completions and chat share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, PrivateAttr, ValidationInfo, model_validator

from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.core.requests import RepetitionLimits
from mlx_parallm.core.schemas import unknown_format
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.fields import (
    CHOSEN_ID,
    INT32_MAX,
    Neutral,
    NonEmptyTokenIds,
    OpenBody,
    TokenId,
    WireInput,
    is_token_ids,
    read_nested,
    refused,
)

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


MAX_SEQUENCES = 128
"""Largest number of sequences of one request, which is `n` times its prompts."""
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 1024
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_PATTERN = 1024
"""Largest number of tokens of a pattern that an answer may be searched for."""
NO_LIMIT = -1
"""The number of tokens to generate that means: as many as fit the context."""


# ---- field types: checked by hand, so that errors name the field and hostile values cost little ----------------------


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refused(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise refused(f"each must be a string of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _stop_token_ids(value: object) -> list[int]:
    if value == []:
        return []
    if not is_token_ids(value) or len(value) > MAX_STOP_TOKEN_IDS:
        raise refused(f"must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return value


def _bad_words(value: object) -> list[str]:
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise refused(f"must be a list of at most {MAX_BAD_WORDS} strings")
    if not all(isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS for word in value):
        raise refused(f"each must be a text of at most {MAX_BAD_WORD_CHARACTERS} characters, not only of white space")
    return value


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise refused(f"must map at most {MAX_BIASES} token ids to numbers")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise refused("each key must be a token id in decimal digits")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise refused(f"each value must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return {int(key): float(bias) for key, bias in value.items()}


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[
    list[str],
    PlainValidator(_stops, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]),
]
StopTokenIds = Annotated[
    list[int],
    PlainValidator(
        _stop_token_ids, json_schema_input_type=Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
    ),
]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS, pattern=r"\S")]
BadWords = Annotated[
    list[str],
    PlainValidator(_bad_words, json_schema_input_type=Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)]),
]
_BiasId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_Biases = Annotated[
    dict[_BiasId, _Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
]
LogitBias = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=_Biases)]
FewLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS)]
TopLogprobs = Annotated[int, Field(ge=0, le=INT32_MAX)]
PromptLength = Annotated[int, Field(ge=-1, le=INT32_MAX, json_schema_extra={"not": {"const": 0}})]
TokenLimit = Annotated[int, Field(ge=NO_LIMIT, le=INT32_MAX)]
MAX_TEMPERATURE = 2
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


# ---- the fields ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidates:
    """How many of the most likely tokens a body asks for at each position. `param`: the field that says so. `number`:
    None if it asks for no logprobs."""

    param: str
    number: int | None = None


def widest(asked: Sequence[Candidates]) -> Candidates:
    """The one with the largest number."""
    return max(asked, key=lambda each: -1 if each.number is None else each.number)


class RepetitionDetection(WireInput):
    """When an answer that repeats itself is ended: its last tokens are a pattern, over and over."""

    max_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN)] = 0
    """Largest number of tokens of the pattern; 0: no answer is ended so."""
    min_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN)] = 0
    """Smallest number of tokens of the pattern; 0 means 1."""
    min_count: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """How often the pattern must come; at least 2, unless `max_pattern_size` is 0."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise refused("must not be over max_pattern_size", "min_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise refused("must be at least 2", "min_count")
        return self

    @property
    def limits(self) -> RepetitionLimits | None:
        """None if `max_pattern_size` is 0."""
        if not self.max_pattern_size:
            return None
        least = max(1, self.min_pattern_size)
        return RepetitionLimits(self.max_pattern_size, least, self.min_count, min_tokens=0, min_tokens_of_few=0)


def _detection(value: object, info: ValidationInfo) -> bool | RepetitionDetection:
    if isinstance(value, bool | RepetitionDetection):
        return value
    if isinstance(value, dict):
        return read_nested(RepetitionDetection, value, info)
    raise refused("must be true, false or an object with max_pattern_size and min_count")


class BasicSampling(WireInput):
    """The sampling fields that all generating routes share. Ranges are OpenAI's, or vLLM's for fields that OpenAI
    lacks."""

    temperature: Temperature = 1.0
    """Divides the logits; 0 means greedy decoding."""
    top_p: TopP = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to at least this; 1 is off, 0 is greedy."""
    seed: Seed | None = None
    """Equal seeds sample equal tokens, whatever else is in the batch. Sample j of a prompt uses `seed` + j."""
    ignore_eos: bool = False
    """Whether to continue after the end-of-sequence token."""
    repetition_detection: (
        Annotated[
            bool | RepetitionDetection, PlainValidator(_detection, json_schema_input_type=bool | RepetitionDetection)
        ]
        | None
    ) = None
    """Whether an answer that repeats itself without end is ended, with the `finish_reason` `repetition`; an object in
    vLLM's form says when. The tokens are looked at every 31 tokens. If it is left out, `--stop-repetition` decides."""


class SamplingFields(BasicSampling):
    """All sampling fields, except the number of tokens and their logprobs, which differ from route to route."""

    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    """Number of answers to each prompt. `n` times the number of prompts is limited; see `/server_info`."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    """Sample from this many most likely tokens; 0 and -1 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this share of the most likely token's probability; 0 is off."""
    stop: Stops = Field(default_factory=list)
    """One text or a list of texts. The answer ends before the first one that the model writes."""
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    """Token ids that end the answer when they are sampled, as the end-of-sequence token does. The sampled token is
    among the answer's token ids, and not in its text."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token for each time it is already in the answer."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divides the positive logits of tokens in prompt and answer, and multiplies the negative ones; 1 is off."""
    logit_bias: LogitBias = Field(default_factory=dict)
    """Values added to logits: maps token ids, in decimal digits, to numbers."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Number of tokens before the answer may end by itself."""
    bad_words: BadWords = Field(default_factory=list)
    """Texts that the answer must not have, with or without a space before them: after the first tokens of one, its last
    token is not sampled. If nothing else can be sampled, it is sampled after all."""
    allowed_token_ids: NonEmptyTokenIds | None = None
    """The only token ids that may be sampled. If the end-of-sequence token is not among them, the answer ends by
    another rule."""
    include_stop_str_in_output: bool = False
    """Whether the text has the stop string or the special token that ended it. No text is held back then, so a stream
    may have sent the beginning of a stop string already."""
    skip_special_tokens: bool = True
    """Whether special tokens add no text. With false, they are part of the text. The token that ends the answer is part
    of it only with `include_stop_str_in_output`."""
    spaces_between_special_tokens: bool = True
    """Has no effect: special tokens are written without spaces between them."""
    prompt_logprobs: TopLogprobs | None = None
    """Return the logprobs of the prompt's tokens and, at each position, of this many most likely tokens: at most 20,
    unless the operator allows more with `--max-logprobs`."""

    def sent_sampling(self) -> dict[str, Any]:
        """Those of these fields that the client sent, as another body can have them."""
        sent = {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}
        if "logit_bias" in sent:
            sent["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return sent


MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_COLLECTED_METADATA_BYTES, MAX_COLLECTED_METADATA_DEPTH = 64 * 1024, 32
MAX_SCORER = 512
"""Largest number of characters of a scorer's name, or of an expression that combines several scorers."""
MAX_CACHE_SALT = 512
"""Largest number of characters of a `cache_salt`."""
MIN_COLLECTED_TEMPERATURE = 0.01
"""Smallest temperature with `collect_trajectory`. Near 0, the distribution has all its mass on one token, and its
logprobs carry no information for training."""

MAX_EPISODE_ID, MAX_GROUP = 256, 4096
"""Largest number of characters of a `group_id` or `episode_id`, and largest `group_size`."""
COLLECTION_HEADERS: Mapping[str, tuple[str, type]] = {
    "x-group-id": ("group_id", str),
    "x-group-size": ("group_size", int),
    "x-episode-id": ("episode_id", str),
    "x-turn": ("turn", int),
}
"""Headers that stand for fields of the body, with the types of the fields, for clients that can add only headers."""
COLLECTION_FIELDS = ("scoring_function", *(name for name, _ in COLLECTION_HEADERS.values()))
"""Fields that need `collect_trajectory`."""

BIASING_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
}
"""Options that bias the sampling distribution, and the values that they may have with `collect_trajectory`."""
COLLECTION_RULE = "a trajectory is sampled from the model's own distribution at its temperature"

UNSUPPORTED_OPTIONS: Neutral = {
    "early_stopping": (False,),
    "ebnf": (),
    "grammar": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "lora_path": (),
    "regex": (),
    "response_format": ({},),
    "structured_outputs": ({},),
    "use_beam_search": (False,),
}
"""The part of `NEUTRAL` that all generating routes share."""


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises the error of `refused` unless `metadata` is OpenAI's: a few short strings."""
    if len(metadata) > MAX_METADATA:
        raise refused(f"must map at most {MAX_METADATA} strings to strings", "metadata")
    for key, text in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            limits = f"keys have at most {MAX_METADATA_KEY} characters, values are text of at most {MAX_METADATA_VALUE}"
            raise refused(f"{limits}; any JSON is accepted with collect_trajectory", "metadata")


def _check_collected_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises the error of `refused` unless `metadata`, which goes to a scorer, is JSON of bounded depth and size."""
    if not is_shallow(metadata, MAX_COLLECTED_METADATA_DEPTH):
        raise refused(f"is nested deeper than {MAX_COLLECTED_METADATA_DEPTH} levels", "metadata")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except ValueError:
        raise refused("numbers must be finite", "metadata") from None
    if size > MAX_COLLECTED_METADATA_BYTES:
        raise refused(f"has {size} bytes as JSON; at most {MAX_COLLECTED_METADATA_BYTES} are kept", "metadata")


# ---- the body --------------------------------------------------------------------------------------

Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]


class StreamOptions(WireInput):
    """What a stream reports about usage."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """Whether one more chunk, before the end, has the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far; needs `include_usage`."""


class CollectableBody(OpenBody):
    """The fields that name the adapter, and those about the collection of answers for training."""

    HEADERS: ClassVar[Mapping[str, tuple[str, type]]] = COLLECTION_HEADERS

    model: str | None = None
    """The served model, `base`, or an adapter: its name (for the live version), `name@version`, or a checkpoint of the
    default adapter. If it is left out or names the served model, the route of `/v1/adapters/route` chooses."""
    lora_adapter: str | None = None
    """An adapter, named as in `model`. `model` may name the served model at the same time. If both name an adapter,
    they must agree."""
    metadata: dict[str, Any] | None = None
    """At most 16 short strings, returned with the answer. With `collect_trajectory`, any JSON of at most 64 KiB and 32
    levels, for the scorer. If the scorer needs an answer and the metadata has none, the server uses the answer of its
    task with the id `problem_id`, or else of its task with the prompt's text. The scorer `reward` gets all columns of
    that task; those of the metadata take precedence."""
    collect_trajectory: bool = False
    """Whether the answers are kept for training. All answers to a prompt are one group."""
    scoring_function: Annotated[str, Field(min_length=1, max_length=MAX_SCORER)] | None = None
    """The scorer that rewards the collected answers; `reward` is the one that the operator configured. If it is left
    out, clients send rewards as feedback."""
    group_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """With `collect_trajectory`: the answers of all requests with the same `group_id` are one group, whose rewards are
    compared with each other. The header `X-Group-Id` can be sent instead of this field."""
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP)] | None = None
    """The group is closed, and can be trained on, when this many of its answers or episodes have ended. If it is left
    out, the group is closed by `POST /v1/training/groups/{group_id}/close`. Also the header `X-Group-Size`."""
    episode_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """With `collect_trajectory`: the requests with the same `episode_id` are the turns of one episode, which gets one
    reward. A chat that repeats the messages of an earlier turn and its answer continues the very tokens of that turn.
    Also the header `X-Episode-Id`."""
    turn: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """The place of the request in its episode. A turn that comes again replaces the earlier one. If it is left out, the
    turns are in order of their arrival. Also the header `X-Turn`."""
    traffic_class: Literal["live", "rollout"] | None = None
    """Whether the request is live traffic or a rollout for training. While requests of both kinds wait, each kind gets
    its share of the batch's rows. By default, a request is live; with `collect_trajectory` it is a rollout, unless the
    server is configured otherwise."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """A text of the client's choice. Requests share cached prefixes only with requests that have the same one, so that
    nobody else can tell from the time of an answer what a prompt contained. Requests without one share with each other.
    """

    def sent_collection(self) -> dict[str, Any]:
        """Those of these fields that the client sent, as another body can have them."""
        return {name: getattr(self, name) for name in CollectableBody.model_fields if name in self.model_fields_set}


class SharedBody(CollectableBody, BasicSampling):
    """The fields that all generating routes of OpenAI share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "prompt_cache_retention", "service_tier"})

    user: str | None = None
    """The user. While two versions of an adapter are compared, all requests of a user get the same one; so do those of
    a session, which the header `X-Session-Id` names. It has no other effect."""
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`."""
    stream: bool = False
    """Whether the answer is sent as server-sent events instead of one body."""


class GenerationBody(SharedBody, SamplingFields, StructuredBody):
    """The fields that completions and chat share."""

    IGNORED: ClassVar[frozenset[str]] = (
        SharedBody.IGNORED
        | StructuredBody.IGNORED
        | {"kv_transfer_params", "reasoning_effort", "store", "thinking", "verbosity", "vllm_xargs"}
    )
    NEUTRAL: ClassVar[Neutral] = UNSUPPORTED_OPTIONS
    MODEL_DEFAULTS: ClassVar[bool] = True
    """Whether the model's own defaults may count for fields that are left out; see `takes_defaults`."""
    PROCESSED_LOGPROBS: ClassVar[bool] = False
    """Whether logprobs are those of the distribution that tokens are sampled from, whatever `--logprobs-mode` says."""

    adapters: str | None = None
    """mlx-lm's name for `lora_adapter`, or the path of an adapter's folder under the operator's adapter roots, which is
    loaded by the first request that names it. A path contains a `/`."""
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    """Must be 1 or equal to `n`: all answers that are generated are returned."""
    stream_options: StreamOptions = StreamOptions()
    """What a stream reports about usage. It has no effect without `stream`."""
    request_id: Annotated[str, Field(pattern=f"^{CHOSEN_ID.pattern}$")] | None = None
    """An id of the client's choice, which the answer's `id` ends with, and which is in the header `x-request-id` of the
    answer. A header of that name that the client sends takes precedence."""
    truncate_prompt_tokens: PromptLength | None = None
    """Keep only this many tokens of each prompt; -1 keeps as many as leave room for the answer. By default, nothing is
    cut off, and a prompt that is too long is refused."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which `truncate_prompt_tokens` cuts: `left` keeps the last tokens, `right` the first ones."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt and of each choice."""
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens in `logprobs` are written as `token_id:<id>`, which is unique, unlike their texts. If it is left
    out, `--return-tokens-as-token-ids` decides."""

    @property
    @abstractmethod
    def task_prompt(self) -> str | None:
        """The text of the prompt, by which the server finds its task. None if there is no such text, or several."""

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """The number of tokens that the client asks for at most; None if it does not say."""

    @property
    def takes_defaults(self) -> bool:
        """Whether the defaults of the model and of the operator count for fields that are left out. They do not for a
        trajectory, which is sampled from the model's own distribution."""
        return self.MODEL_DEFAULTS and not self.collect_trajectory

    @property
    def default_max_tokens(self) -> int | None:
        """The limit if the client asks for none; less if the context has less room. None: the model's own default, or
        else as many as fit."""
        return None

    @property
    @abstractmethod
    def candidates(self) -> Candidates:
        """The most likely tokens to report for each generated token."""

    @property
    def prompt_candidates(self) -> Candidates:
        """The most likely tokens to report for each token of the prompt."""
        return Candidates("prompt_logprobs", self.prompt_logprobs)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise refused("not supported by this server except as 1 or the same as n; leave it out", "best_of")
        if self.truncate_prompt_tokens == 0:
            raise refused("must be at least 1, or -1", "truncate_prompt_tokens")
        if self._grammar is not None:
            self.check_grammar_options(self._grammar[0])
        if self.collect_trajectory:
            self._check_collected()
        elif given := [name for name in COLLECTION_FIELDS if getattr(self, name) is not None]:
            raise refused("needs collect_trajectory: true", given[0])
        elif self.metadata:
            _check_metadata(self.metadata)
        return self

    def check_grammar_options(self, param: str) -> None:
        """Raises the error of `refused` if an option cannot be combined with a grammar, for which `param` asks."""
        if self.collect_trajectory:
            raise refused(f"not supported with collect_trajectory: {COLLECTION_RULE}; leave it out", param)
        for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if getattr(self, name):
                raise refused(f"cannot be combined with {param}, which decides where the text ends", name)
        if self.allowed_token_ids is not None:
            raise refused(f"cannot be combined with {param}, which decides which tokens may come", "allowed_token_ids")

    def _check_collected(self) -> None:
        _check_collected_metadata(self.metadata or {})
        for name, allowed in BIASING_OPTIONS.items():
            if getattr(self, name) not in allowed:
                raise refused(f"not supported with collect_trajectory: {COLLECTION_RULE}; leave it out", name)
        for name, needed in (("group_size", "group_id"), ("turn", "episode_id")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise refused(f"needs {needed}", name)
        if self.episode_id is not None and self.n > 1:
            raise refused("must be 1 with episode_id: an episode has one answer a turn", "n")
        if self.episode_id is not None and self.truncate_prompt_tokens is not None:
            raise refused("not supported with episode_id, whose turns continue each other", "truncate_prompt_tokens")
        if self.temperature < MIN_COLLECTED_TEMPERATURE:
            least = f"must be at least {MIN_COLLECTED_TEMPERATURE} with collect_trajectory"
            raise refused(f"{least}: {COLLECTION_RULE}", "temperature")


MAX_INPUTS = 2048
"""Largest number of texts of one request, which is OpenAI's. At most `MAX_SEQUENCES` are in the engine at a time."""
MAX_POOLED_TOKENS = 2**20
"""Number of tokens that all texts of one request may have together; or more, if `MAX_SEQUENCES` as long as the context
have more. Where one text stands in all pairs, the size of the body does not bound them."""
WHOLE_CONTEXT = -1
"""The value of `truncate_prompt_tokens` that means the context's length."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise refused("must be at least 1, or -1 for the context's length")
    return value


def together(prompts: Iterable[Sequence[int]], context: int, param: str) -> tuple[tuple[int, ...], ...]:
    """The token ids of all texts. Raises InvalidRequestError, naming `param`, as soon as they are too many."""
    most, total, taken = max(MAX_POOLED_TOKENS, MAX_SEQUENCES * context), 0, []
    for ids in prompts:
        total += len(ids)
        if total > most:
            raise InvalidRequestError(
                f"{param}: together, the texts have more than {most} tokens; send fewer at a time.", param=param
            )
        taken.append(tuple(ids))
    return tuple(taken)


Truncation = Annotated[int, Field(ge=WHOLE_CONTEXT, le=INT32_MAX), AfterValidator(_not_zero)]


class PoolingBody(OpenBody):
    """The model, and how long texts may be. The constants stand for the fields that only a generation has."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"mm_processor_kwargs"})

    adapters: ClassVar[None] = None
    stream: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    collect_trajectory: ClassVar[bool] = False
    group_id: ClassVar[None] = None
    episode_id: ClassVar[None] = None
    task_prompt: ClassVar[None] = None
    safety_identifier: ClassVar[None] = None

    model: str | None = None
    """The served model, `base`, or an adapter: its name (for the live version), `name@version`, or a checkpoint of the
    default adapter. If it is left out or names the served model, the route of `/v1/adapters/route` chooses."""
    lora_adapter: str | None = None
    """An adapter, named as in `model`. `model` may name the served model at the same time."""
    user: str | None = None
    """The user. While two versions of an adapter are compared, all requests of a user get the same one."""
    request_id: Annotated[str, Field(pattern=f"^{CHOSEN_ID.pattern}$")] | None = None
    """An id of the client's choice, as in completions."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """A text of the client's choice. Requests share cached prefixes only with requests that have the same one."""
    truncate_prompt_tokens: Truncation | None = None
    """Longer texts are cut to this many tokens; -1 cuts them to the model's context. If it is left out, a text that is
    longer than the context is an error."""

    def most_tokens(self, context: int) -> int | None:
        """The number of tokens to which texts are cut. None: they are not cut.

        Raises:
            InvalidRequestError: it is over the `context`.
        """
        most = self.truncate_prompt_tokens
        if most is not None and most > context:
            raise InvalidRequestError(
                f"{most} tokens are more than the model's context of {context}; send less, or -1 for the context.",
                param="truncate_prompt_tokens",
            )
        return context if most == WHOLE_CONTEXT else most
