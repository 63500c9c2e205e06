"""Measures the throughput of 16 clients whose prompts begin with the same 500 tokens, which every cache holds already.

[system prompt of 500 tokens | question] answer of 48 tokens
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.lib.load import closed_loop
from benchmarks.lib.prefix.sides import Side, ask, body, rotated
from benchmarks.lib.prefix.texts import MESSAGE_WORDS, Messages, system, user, words

CLIENTS, REQUESTS_PER_CLIENT = 16, 2
PREFIX_WORDS, TOKENS = 492, 48
"""The chat template puts 3 tokens before these words and 5 between them and the question."""


@dataclass(slots=True)
class Shared:
    """One server's figures. The lists have one value per repeat; rates are in tokens per second."""

    name: str
    rates: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)
    resets: int = 0
    errors: list[str] = field(default_factory=list)


async def measure(sides: Sequence[Side], repeats: int, quick: bool) -> dict[str, Shared]:
    """Measures each server in turn. One request, which is not timed, computes the prefix before."""
    results = {side.name: Shared(side.name) for side in sides}
    for repeat in range(repeats):
        warm, *prompts = _prompts(1 + CLIENTS * (1 if quick else REQUESTS_PER_CLIENT), repeat)
        for side in rotated(sides, repeat):
            with side.peer.awake():
                await ask(side, warm, 1)
                await _load(side, prompts, results[side.name])
            print(f"  {CLIENTS} clients  {side.name:<22} {results[side.name].rates[-1]:6.1f} tok/s", flush=True)
    return results


async def _load(side: Side, prompts: Sequence[Messages], result: Shared) -> None:
    load = await closed_loop(side.peer.port, [body(prompt, TOKENS) for prompt in prompts], CLIENTS, side.attempts)
    result.rates.append(load.rate)
    result.first_token_s.append(median([stream.first_token_s for stream in load.streams] or [math.nan]))
    prompt_tokens = sum(stream.prompt_tokens for stream in load.streams)
    cached_tokens = sum(stream.cached_tokens for stream in load.streams)
    result.hit_rates.append(cached_tokens / prompt_tokens if prompt_tokens else math.nan)
    result.resets += load.resets
    result.errors += load.errors


def _prompts(count: int, repeat: int) -> list[Messages]:
    prefix = system(words(PREFIX_WORDS, f"shared {repeat}"))
    return [[prefix, user(words(MESSAGE_WORDS, f"shared {repeat} {number}"))] for number in range(count)]
