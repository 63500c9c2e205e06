"""The request fields that say how tokens are drawn, where an answer ends, and which logprobs it has. Completions and
chat have them in the body itself, token-in, token-out routes in an object of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, ValidationInfo, model_validator

from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.requests import RepetitionLimits
from mlx_parallm.server.api.fields import (
    INT32_MAX,
    NonEmptyTokenIds,
    TokenId,
    WireInput,
    is_token_ids,
    read_nested,
    refused,
)

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
Temperature = Annotated[float, Field(ge=0, le=2)]
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
        return read_nested(RepetitionDetection.model_validate, value, info)
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
    """Token ids that end the answer when they are drawn, as the end-of-sequence token does. The drawn one is among the
    answer's token ids, and not in its text."""
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
    token is not drawn. If nothing else can be drawn, it is drawn after all."""
    allowed_token_ids: NonEmptyTokenIds | None = None
    """The only token ids that may be drawn. If the end-of-sequence token is not among them, the answer ends by another
    rule."""
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
