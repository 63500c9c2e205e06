"""ScoredData: a group of sequences with their scores, as environments of Atropos send it, and what is trained of it.

    tokens              [[1, 2, 3, 4], ...]              a list for each sequence of the group
    masks               [[-100, -100, 3, 4], ...]        the token where it is trained, -100 elsewhere
    inference_logprobs  [[1.0, 1.0, -0.3, -0.1], ...]    1.0 where nothing is trained
    scores              [0.5, ...]                       one for each sequence

The fields are those of `atroposlib.api.server.ScoredData` in atroposlib 0.4.0, and types are converted as there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import InvalidRequestError

IGNORED_TOKEN = -100
"""In `masks`: nothing is trained at this position."""

MAX_SEQUENCES = 4096
"""Largest number of sequences in one group."""

_MAX_LOGPROB = 1e-3
"""Logprobs are at most 0, but float32 sums can be slightly above."""


class ScoredData(BaseModel):
    """One group. Unknown fields are ignored, as Atropos does; so is `messages`, apart from its texts."""

    model_config = ConfigDict(frozen=True)

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    def digest(self) -> str:
        """32 hexadecimal digits that differ between groups of different content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]

    @property
    def texts(self) -> tuple[str, ...]:
        """The content of the last message of each sequence; empty if they are not all given."""
        last = [conversation[-1].get("content") for conversation in self.messages or () if conversation]
        texts = tuple(content for content in last if isinstance(content, str))
        return texts if len(texts) == len(self.tokens) else ()


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """`context`: the most tokens of a sequence. `vocabulary`: token ids are below it."""

    context: int
    vocabulary: int


def trajectories_of(data: ScoredData, limits: TokenLimits) -> tuple[GivenTrajectory, ...]:
    """What is trained of a group: one trajectory for each sequence.

    Raises:
        InvalidRequestError: the group is malformed, or has what this trainer does not train on.
    """
    _check_supported(data)
    count = len(data.tokens)
    if not 1 <= count <= MAX_SEQUENCES:
        raise _refused("tokens", f"a group has 1 to {MAX_SEQUENCES} sequences, and this one has {count}")
    for name in ("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "overrides"):
        values = getattr(data, name)
        if values is not None and len(values) != count and (values or name in ("masks", "scores")):
            raise _refused(name, f"there are {len(values)} for {count} sequences")
    return tuple(_trajectory(data, number, limits) for number in range(count))


def _check_supported(data: ScoredData) -> None:
    if data.images:
        raise _refused("images", "this trainer trains language models on text alone; leave them out")
    if data.distill_token_ids or data.distill_logprobs:
        raise _refused(
            "distill_token_ids, distill_logprobs",
            "this trainer does not distil from a teacher's best tokens; leave them out and send scores",
        )


def _trajectory(data: ScoredData, number: int, limits: TokenLimits) -> GivenTrajectory:
    tokens, mask = data.tokens[number], data.masks[number]
    _check_tokens(tokens, f"tokens[{number}]", limits)
    drawn = _drawn(tokens, mask, f"masks[{number}]")
    # Context after the last trained token teaches nothing. The first token has nothing before it that predicts it.
    first, end = (drawn[0], drawn[-1] + 1) if drawn else (1, len(tokens))
    trained = frozenset(drawn)
    advantages = _of_tokens(data.advantages, number, len(tokens), "advantages")
    if _overrides(data, number).get("set_advantage_to_zero"):
        advantages = (0.0,) * len(tokens)
    logprobs = _of_tokens(data.inference_logprobs, number, len(tokens), "inference_logprobs")
    reference = _of_tokens(data.ref_logprobs, number, len(tokens), "ref_logprobs")
    if logprobs:
        _check_logprobs(logprobs, drawn, f"inference_logprobs[{number}]")
    if reference:
        _check_logprobs(reference, drawn, f"ref_logprobs[{number}]")
    return GivenTrajectory(
        prompt_ids=tuple(tokens[:first]),
        completion_ids=tuple(tokens[first:end]),
        reward=_score(data.scores[number], number),
        sampling_logprobs=_where_drawn(logprobs, trained, first, end),
        temperature=_temperature(data, number),
        mask=tuple(at in trained for at in range(first, end)) if len(drawn) < end - first else (),
        advantages=advantages[first:end],
        reference_logprobs=_where_drawn(reference, trained, first, end),
    )


def _check_tokens(tokens: Sequence[int], param: str, limits: TokenLimits) -> None:
    if len(tokens) < 2:
        raise _refused(param, "a sequence needs at least two tokens")
    if len(tokens) > limits.context:
        raise _refused(param, f"{len(tokens)} tokens do not fit the context of {limits.context}")
    if not 0 <= min(tokens) <= max(tokens) < limits.vocabulary:
        raise _refused(
            param, f"token ids are from 0 to {limits.vocabulary - 1}; give the environment this model's tokenizer"
        )


def _drawn(tokens: Sequence[int], mask: Sequence[int], param: str) -> list[int]:
    """Where tokens are trained, in order; never at the first one."""
    if len(mask) != len(tokens):
        raise _refused(param, f"there are {len(mask)} values for {len(tokens)} tokens")
    for at, (token, value) in enumerate(zip(tokens, mask, strict=True)):
        if value not in (IGNORED_TOKEN, token):
            raise _refused(param, f"position {at} is {value}; it is the token there, {token}, or {IGNORED_TOKEN}")
    return [at for at, value in enumerate(mask) if at and value != IGNORED_TOKEN]


def _of_tokens(values: list[list[float]] | None, number: int, tokens: int, name: str) -> tuple[float, ...]:
    """One finite value for each token of a sequence; empty if none were sent."""
    if not values:
        return ()
    of_sequence = values[number]
    if len(of_sequence) != tokens:
        raise _refused(f"{name}[{number}]", f"there are {len(of_sequence)} values for {tokens} tokens")
    if not all(map(math.isfinite, of_sequence)):
        raise _refused(f"{name}[{number}]", "all values must be finite")
    return tuple(of_sequence)


def _check_logprobs(logprobs: Sequence[float], drawn: Sequence[int], param: str) -> None:
    for at in drawn:
        if logprobs[at] > _MAX_LOGPROB:
            raise _refused(
                param, f"position {at} is trained, and its value {logprobs[at]} is no logprob: it is above 0"
            )


def _where_drawn(values: Sequence[float], drawn: frozenset[int], first: int, end: int) -> tuple[float, ...]:
    return tuple(values[at] if at in drawn else 0.0 for at in range(first, end)) if values else ()


def _score(score: float, number: int) -> float:
    if not math.isfinite(score):
        raise _refused(f"scores[{number}]", "a score must be finite")
    return score


def _overrides(data: ScoredData, number: int) -> Mapping[str, Any]:
    return data.overrides[number] if data.overrides else {}


def _temperature(data: ScoredData, number: int) -> float:
    """That of the sequence, else of the group's generation, else of the group, else 1; as Atropos' own trainer does."""
    sources = (_overrides(data, number), data.generation_params or {}, data.group_overrides or {})
    value = next((found for source in sources if (found := source.get("temperature")) is not None), 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise _refused("temperature", f"it must be a number above 0, and is {value!r:.40}; sample at one above 0")
    return float(value)


def _refused(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", param)
