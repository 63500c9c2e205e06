"""EngineApi: how one kind of inference server is asked for samples, and how it takes a LoRA adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.extras.engines.http import EngineServer

_LARGEST = 0.01
"""A logprob may be rounded to a little more than 0."""
_NO_LOGPROB = -9999.0
"""What OpenAI-compatible servers send for minus infinity."""


@dataclass(frozen=True, slots=True)
class Draw:
    """`n` samples of one prompt, of at most `max_tokens` tokens, from the model's whole distribution at `temperature`.
    Sample j has the seed `seed + j`, in engines that take seeds."""

    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one answer, with the end-of-sequence token if that ended it, and the logprob of each in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """An adapter version as a server knows it: a name that no other version gets, and the folder of its files."""

    name: str
    folder: Path


class EngineApi(Protocol):
    """The requests of one kind of server. Every method raises EngineServerError if the server fails it."""

    @property
    def adapter_format(self) -> FormatName:
        """The format of the adapter files that it reads."""

    @property
    def logprobs_at_temperature(self) -> bool:
        """Whether its logprobs are of the distribution at the request's temperature. Otherwise, they are those of
        temperature 1."""

    async def connect(self) -> None:
        """Finds out what later requests need, such as the name of the base model."""

    async def load(self, adapter: SentAdapter) -> None:
        """Makes the server read an adapter's files."""

    async def unload(self, adapter: SentAdapter) -> None:
        """Makes the server forget an adapter."""

    async def draw(self, draw: Draw, adapter: SentAdapter | None) -> list[Sample]:
        """`draw.n` samples with an adapter; None: of the base model."""


def sample_of(server: EngineServer, token_ids: object, logprobs: object) -> Sample:
    """A sample from two lists of an answer.

    Raises:
        EngineServerError: a list is missing or malformed, or they do not belong together.
    """
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise server.unusable("gives no token ids of its answers, and training needs the very tokens that were drawn")
    if not isinstance(logprobs, list) or not all(map(_is_logprob, logprobs)):
        raise server.unusable("gives no logprobs of its answers' tokens, which training needs")
    if not token_ids or len(token_ids) != len(logprobs):
        raise server.unusable(f"gives {len(logprobs)} logprobs for {len(token_ids)} tokens")
    return Sample(tuple(token_ids), tuple(map(float, logprobs)))


def _is_logprob(value: object) -> bool:
    if not isinstance(value, float | int) or isinstance(value, bool):
        return False
    return math.isfinite(value) and _NO_LOGPROB < value <= _LARGEST
