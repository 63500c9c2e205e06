"""Field types whose JSON form is looser than ours: one string or many, keys that are numbers.

Checked by hand rather than by union, so that a fault names the field and a hostile value costs little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from mlx_parallm.server.wire.base import refused

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_COLLECTED_METADATA, MAX_COLLECTED_DEPTH = 64 * 1024, 32
MAX_TOKEN_ID = 2**31 - 1
NO_OTHER_KEYS: dict[str, Any] = {"additionalProperties": False}

Prompt = str | list[int]


def is_token_ids(value: object) -> bool:
    """A non-empty list of integers that a vocabulary could hold."""
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in value)


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value) or all(is_token_ids(prompt) for prompt in value):
            return value
        if is_token_ids(value):
            return [value]
    raise refused("must be a string, a list of strings, a list of token ids, or a list of such lists, none empty")


def _token_ids(value: object) -> list[int]:
    if value == [] or is_token_ids(value):
        return list(value)  # type: ignore[call-overload,no-any-return]
    raise refused("must be a list of token ids")


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refused(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise refused(f"each must be a string of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise refused(f"must map at most {MAX_BIASES} token ids to numbers")
    return {_bias_id(key): _bias(bias) for key, bias in value.items()}


def _bias_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key:
        return int(key)
    raise refused("each key must be a token id in decimal digits")


def _bias(value: object) -> float:
    if type(value) in (int, float) and -MAX_BIAS <= value <= MAX_BIAS:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise refused(f"each value must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises what `refused` makes: it is not OpenAI's, a few short strings."""
    if len(metadata) > MAX_METADATA:
        raise refused(f"must map at most {MAX_METADATA} strings to strings", "metadata")
    for key, text in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            reason = f"keys have at most {MAX_METADATA_KEY} characters, values are text of {MAX_METADATA_VALUE}"
            raise refused(f"{reason}; with collect_trajectory any JSON is taken", "metadata")


def check_collected_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises what `refused` makes: a scorer's data is too long, too deep, or no JSON."""
    if not _shallow(metadata, MAX_COLLECTED_DEPTH):
        raise refused(f"is nested deeper than {MAX_COLLECTED_DEPTH} levels", "metadata")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except ValueError:
        raise refused("numbers must be finite", "metadata") from None
    if size > MAX_COLLECTED_METADATA:
        raise refused(f"has {size} bytes as JSON; at most {MAX_COLLECTED_METADATA} are kept", "metadata")


def _shallow(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(part, levels - 1) for part in inner)


def _some_token_ids(value: object) -> list[int]:
    if is_token_ids(value):
        return list(value)  # type: ignore[call-overload,no-any-return]
    raise refused("must be a list of token ids, and not empty")


_Id = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_BiasKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]

Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | _Texts | _Ids | Annotated[list[_Ids], Field(min_length=1)]),
]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[_Id])]
SomeTokenIds = Annotated[list[int], PlainValidator(_some_token_ids, json_schema_input_type=_Ids)]
Stops = Annotated[
    list[str],
    PlainValidator(_stops, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(
        _biases,
        json_schema_input_type=Annotated[
            dict[_BiasKey, _Bias], Field(max_length=MAX_BIASES, json_schema_extra=NO_OTHER_KEYS)
        ],
    ),
]
