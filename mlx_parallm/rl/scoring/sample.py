"""What a scorer reads: one completion, and the metadata of its request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import InvalidRequestError

Metadata = Mapping[str, Any]

PARAM = "metadata"
"""The field of a request that scorers read."""

SCORER_PARAM = "scoring_function"
"""The field of a request that names a scorer."""


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
            "reward_models": {},
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
    """The value of a key. Raises InvalidRequestError: there is none."""
    value = metadata.get(key)
    if value is None:
        raise refused(key, "is missing: the scoring function reads it")
    return value


def refused(key: str, why: str) -> InvalidRequestError:
    """The error for a request whose metadata cannot be used."""
    return InvalidRequestError(f"{PARAM}.{key} {why}", PARAM)


def unusable(why: str) -> InvalidRequestError:
    """The error for a request whose scorer cannot be used."""
    return InvalidRequestError(f"{SCORER_PARAM}: {why}", SCORER_PARAM)


def json_object(metadata: Metadata, key: str) -> dict[str, Any]:
    """The value of a key: an object, or the JSON text of one."""
    value = present(metadata, key)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise refused(key, "must be a JSON object") from error
    if not isinstance(value, dict):
        raise refused(key, "must be a JSON object")
    return value
