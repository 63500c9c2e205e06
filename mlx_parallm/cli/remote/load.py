"""The requests of `mlx_parallm bench`: so many at a time to one server, and what each of them took."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import httpx

from mlx_parallm.cli.remote.client import Client
from mlx_parallm.cli.remote.streaming import STREAM_TIMEOUT, stream_chat
from mlx_parallm.errors import ConfigError, ParaLLMError

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind"),
)


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """One request that was answered. Times are in seconds since it was sent.

    Attributes:
        first_s: until the first token.
        seconds: until the last one.
        counted: whether the server said how many tokens there were; else each chunk counts as one.
    """

    first_s: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    counted: bool

    @property
    def token_s(self) -> float | None:
        """Mean time between two tokens; None for an answer of one token."""
        return (self.seconds - self.first_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 95th percentile of a time in seconds."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        parts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
        return cls(parts[9], parts[18])


@dataclass(frozen=True, slots=True)
class Level:
    """What a number of requests at a time gave.

    Attributes:
        seconds: from the first request to the end of the last answer.
        errors: the different reasons why requests failed.
        first, token, whole: times to the first token, between two tokens, and of the whole answer; None if no request
            was answered, or if no answer had two tokens.
    """

    concurrency: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    counted: bool
    errors: tuple[str, ...]
    first: Spread | None
    token: Spread | None
    whole: Spread | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests together."""
        return self.completion_tokens / self.seconds


def prompt(seed: str, words: int) -> str:
    """A text of so many common words, most of which are one token. Every seed has its own."""
    drawn = random.Random(seed)
    return " ".join(drawn.choice(_WORDS) for _ in range(words))


async def measure(
    client: Client, models: Sequence[str | None], options: Mapping[str, Any], words: int, concurrency: int, count: int
) -> Level:
    """Sends `count` requests, `concurrency` at a time. No two calls send the same prompt, so that no server has one in
    its prefix cache. `models`: names that the requests have in turn.

    Raises:
        ConfigError: the server refuses the requests: their key, or their Host header.
    """
    limits, call = httpx.Limits(max_connections=concurrency), secrets.token_hex(8)
    numbers = iter(range(count))
    answers: list[LoadAnswer] = []
    errors: list[str] = []

    async def worker(http: httpx.AsyncClient) -> None:
        for number in numbers:
            model = models[number % len(models)]
            body = {**options, **({"model": model} if model else {})}
            body["messages"] = [{"role": "user", "content": prompt(f"{call} {number}", words)}]
            try:
                answers.append(await _answer(client, http, body))
            except ConfigError:
                raise
            except ParaLLMError as error:
                errors.append(str(error))

    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=STREAM_TIMEOUT, limits=limits) as http:
        await asyncio.gather(*(worker(http) for _ in range(concurrency)))
    return _level(concurrency, answers, errors, time.perf_counter() - begun)


async def _answer(client: Client, http: httpx.AsyncClient, body: Mapping[str, Any]) -> LoadAnswer:
    begun = time.perf_counter()
    times, usage = [], None
    async for chunk in stream_chat(client, http, body):
        with client.reading():
            usage = chunk.get("usage") or usage
            deltas = [choice["delta"] for choice in chunk.get("choices") or ()]
        if any(delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "tool_calls")):
            times.append(time.perf_counter() - begun)
    if not times:
        raise ParaLLMError("an answer has no text")
    tokens = len(times) if usage is None else usage["completion_tokens"]
    return LoadAnswer(times[0], times[-1], usage["prompt_tokens"] if usage else 0, tokens, usage is not None)


def _level(concurrency: int, answers: Sequence[LoadAnswer], errors: Sequence[str], seconds: float) -> Level:
    between = [each.token_s for each in answers if each.token_s is not None]
    return Level(
        concurrency,
        len(answers) + len(errors),
        len(errors),
        seconds,
        sum(each.prompt_tokens for each in answers),
        sum(each.completion_tokens for each in answers),
        all(each.counted for each in answers),
        tuple(dict.fromkeys(errors)),
        Spread.of([each.first_s for each in answers]) if answers else None,
        Spread.of(between) if between else None,
        Spread.of([each.seconds for each in answers]) if answers else None,
    )
