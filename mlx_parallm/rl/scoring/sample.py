"""What a scorer reads: one completion, and the metadata of its request.

The functions of this module read one key of `metadata` each. They raise InvalidRequestError if it is missing, or cannot
be used. Those whose name ends in `_text` check only type and size, so they take no time whatever a client sends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, SupportsFloat

from mlx_parallm.core import Trajectory
from mlx_parallm.errors import InvalidRequestError, shown

Metadata = Mapping[str, Any]

PARAM = "metadata"

_NUMBER = re.compile(r"(?:(?<![\w).])[-+])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
"""A sign after a digit is that of a difference."""
_MAX_PATTERN = 4096
_MAX_SCHEMA = 2**16
_ENTRY_KEYS = ("question", "answer", "metadata")


@dataclass(frozen=True, slots=True)
class ScorerInput:
    """One completion. It is sent to the scoring process as JSON, so tuples in `metadata` become lists.

    `text`: without the end-of-sequence token, which `completion_tokens` counts. `finish_reason`: "stop", "length"
    or "repetition".
    `prompt`: the text, or the messages if there was none. It and the token ids are there for the server's reward only.
    `reward_models`: the rewards that reward models gave, by scorer.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    metadata: Metadata
    prompt: str | Sequence[Metadata] = ""
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    reward_models: Mapping[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the sequence ended by itself. A text that was cut off is not an answer."""
        return self.finish_reason == "stop"

    @property
    def completion(self) -> str | list[Metadata]:
        """The text; for a prompt of messages, one message of the assistant."""
        return self.text if isinstance(self.prompt, str) else [self._answer]

    @property
    def messages(self) -> list[Metadata]:
        """The conversation, which ends with the answer. A prompt that is a text is one message of the user."""
        turns = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return [*turns, self._answer]

    @property
    def _answer(self) -> Metadata:
        return {"role": "assistant", "content": self.text}

    @staticmethod
    def to_json(trajectory: Trajectory, whole: bool = False) -> dict[str, Any]:
        """The fields for this trajectory. `whole`: also the prompt and the token ids, which only some scorers read."""
        collection = trajectory.collection
        prompt = collection.prompt_text or list(collection.messages) or ""
        ids = {"prompt_ids": trajectory.prompt_ids, "completion_ids": trajectory.completion_ids}
        return {
            "text": trajectory.text,
            "prompt_tokens": len(trajectory.prompt_ids),
            "completion_tokens": len(trajectory.completion_ids),
            "finish_reason": trajectory.finish_reason and trajectory.finish_reason.value,
            "metadata": dict(collection.metadata),
            **({"prompt": prompt, **ids} if whole else {}),
        }


Scorer = Callable[[ScorerInput], float]
"""Returns a finite reward. A package's scorer may list the keys of `metadata` that it reads in an attribute
`requires: tuple[str, ...]`."""

GroupScorer = Callable[[Sequence[ScorerInput]], Sequence[float | None]]
"""Returns one finite reward for each sample of a group, or None for a sample that it does not apply to."""


class ScorerError(Exception):
    """A scorer failed. The message says what happened and where; it needs no name of an exception before it."""


def as_number(value: object) -> float:
    """The value as a float. Raises TypeError: it is no number."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"gave {type(value).__name__}, not a number")
    return float(value)


def present(metadata: Metadata, key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise refused(key, "is missing: the scoring function reads it")
    return value


def answer(metadata: Metadata) -> str:
    """`answer`: a number, or text that is not blank."""
    value = present(metadata, "answer")
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise refused("answer", "must be text or a number")
    return str(value)


def number(metadata: Metadata) -> str:
    """`answer` as gsm8k has it: a number, or a solution that ends with `#### 42`. Returned without commas and $."""
    text = answer(metadata).rpartition("####")[2].strip()
    if not _NUMBER.fullmatch(text):
        raise refused("answer", f"must be a number, or end with '#### ' and one, not {shown(text)}")
    return _plain(text)


def last_number(text: str) -> float | None:
    """The last number in a text; None if it has none."""
    found = _NUMBER.findall(text)
    return float(_plain(found[-1])) if found else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def pattern_text(metadata: Metadata) -> str:
    """`pattern`: text of bounded length."""
    value = present(metadata, "pattern")
    if not isinstance(value, str) or len(value) > _MAX_PATTERN:
        raise refused("pattern", f"must be text of at most {_MAX_PATTERN} characters")
    return value


def pattern(metadata: Metadata) -> re.Pattern[str]:
    """`pattern` as a regular expression of Python's `re`. Compiling it may take long."""
    try:
        return re.compile(pattern_text(metadata))
    except (re.error, RecursionError, OverflowError) as error:
        raise refused("pattern", f"is not a regular expression: {error}") from error


def schema_text(metadata: Metadata) -> str:
    """`schema`: an object, or its JSON text; returned as JSON of bounded length."""
    text = json.dumps(_object(metadata, "schema"))
    if len(text) > _MAX_SCHEMA:
        raise refused("schema", f"must have at most {_MAX_SCHEMA} characters as JSON")
    return text


def schema(metadata: Metadata) -> Any:
    """The validator of the JSON schema `schema`, which fetches no remote references. Checking it may take long."""
    return _validator(schema_text(metadata))


@lru_cache(maxsize=16)
def _validator(text: str) -> Any:
    """Cached, because all samples of a group have the same schema."""
    import jsonschema  # only requests with this scorer pay for it
    from jsonschema_specifications import REGISTRY

    value = json.loads(text)
    try:
        kind = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)
        kind.check_schema(value)
    except Exception as error:  # a client's schema may make the library raise anything
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
    """`entry`: one entry of a reasoning-gym data set, as an object or its JSON text."""
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
