"""What scorers read of `metadata`. Each raises InvalidRequestError where it is absent or cannot be used."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any

from mlx_parallm.adapters.names import shown
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.sample import Metadata

PARAM = "metadata"

_NUMBER = re.compile(r"[-+]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_LONGEST_PATTERN = 4096
_LONGEST_SCHEMA = 2**16
_ENTRY_KEYS = ("question", "answer", "metadata")


def present(metadata: Metadata, key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise refused(key, "is missing: the scoring function reads it")
    return value


def answer(metadata: Metadata) -> str:
    """`answer`: text or a number, not blank."""
    value = present(metadata, "answer")
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise refused("answer", "must be text or a number")
    return str(value)


def number(metadata: Metadata) -> str:
    """`answer` of gsm8k: a number, or a solution that ends with `#### 42`. Plain digits, without thousands' commas."""
    text = answer(metadata).rpartition("####")[2].strip()
    if not _NUMBER.fullmatch(text):
        raise refused("answer", f"must be a number, or end with '#### ' and one, not {shown(text)}")
    return text.replace(",", "").replace("$", "")


def pattern_text(metadata: Metadata) -> str:
    """`pattern`, as text of bounded length."""
    value = present(metadata, "pattern")
    if not isinstance(value, str) or len(value) > _LONGEST_PATTERN:
        raise refused("pattern", f"must be text of at most {_LONGEST_PATTERN} characters")
    return value


def pattern(metadata: Metadata) -> re.Pattern[str]:
    """`pattern`: a regular expression of Python's `re`. May take long to compile."""
    try:
        return re.compile(pattern_text(metadata))
    except (re.error, RecursionError, OverflowError) as error:
        raise refused("pattern", f"is not a regular expression: {error}") from error


def schema_text(metadata: Metadata) -> str:
    """`schema`, an object or its text, as text of bounded length."""
    text = json.dumps(_object(metadata, "schema"))
    if len(text) > _LONGEST_SCHEMA:
        raise refused("schema", f"must have at most {_LONGEST_SCHEMA} characters as JSON")
    return text


def schema(metadata: Metadata) -> Any:
    """`schema`: a JSON schema. Returns its validator, which fetches no remote references. May take long to check."""
    return _validator(schema_text(metadata))


@lru_cache(maxsize=16)
def _validator(text: str) -> Any:
    """Once for a group's samples."""
    import jsonschema  # only requests with this scorer pay for it
    from jsonschema_specifications import REGISTRY

    value = json.loads(text)
    try:
        kind = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)
        kind.check_schema(value)
    except Exception as error:  # whatever a schema from outside makes the library raise
        raise refused("schema", f"is not a JSON schema: {shown(str(getattr(error, 'message', error)))}") from error
    return kind(value, registry=REGISTRY)


def target_length(metadata: Metadata) -> float:
    """`target_length`: a number of tokens, at least 1."""
    value = present(metadata, "target_length")
    try:
        length = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        length = math.nan
    if not 1 <= length < math.inf:
        raise refused("target_length", "must be a number of tokens, at least 1")
    return length


def entry(metadata: Metadata) -> dict[str, Any]:
    """`entry`: one of reasoning-gym's data set, as an object or its text."""
    value = _object(metadata, "entry")
    if missing := [key for key in _ENTRY_KEYS if key not in value]:
        raise refused("entry", f"lacks {', '.join(missing)}: give the entry as the data set has it")
    return value


def refused(key: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}.{key} {why}", PARAM)


def _object(metadata: Metadata, key: str) -> dict[str, Any]:
    value = present(metadata, key)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise refused(key, "must be a JSON object") from error
    if not isinstance(value, dict):
        raise refused(key, "must be a JSON object")
    return value
