"""Prompts whose keys and values come from the prefix cache."""

from __future__ import annotations

import numpy as np

from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedModel

_PROMPT, _ANSWER = 2 * BLOCK_TOKENS + 22, 6


async def _hit(tested: TestedModel) -> Outcome:
    """The same prompt without a cache, from the cache, longer from the cache, and with an adapter that must not use
    the base model's part of it."""
    prompt, adapter = tested.prompt(_PROMPT, seed=40), tested.adapter(seed=41)
    first, again = await tested.ask(prompt, _ANSWER), await tested.ask(prompt, _ANSWER)
    next_turn = [*prompt, *first.tokens, *tested.prompt(30, seed=42)]
    longer = await tested.ask(next_turn, _ANSWER)
    adapted = await tested.ask(prompt, _ANSWER, adapter=await tested.publish("cache", adapter))
    found = [
        float(np.abs(np.subtract(first.logprobs, again.logprobs)).max()),
        await tested.difference(prompt, again),
        await tested.difference(next_turn, longer),
        await tested.difference(prompt, adapted, adapter),
    ]
    problem = "" if first.cached == 0 else "a new prompt was taken from the cache"
    if min(again.cached, longer.cached) < 2 * BLOCK_TOKENS:
        problem = "a prompt that was computed before was computed again"
    if adapted.cached:
        problem = "a prompt of an adapter was taken from the base model's part of the cache"
    return Outcome.of(found, tested.rounding.of_logprobs, problem)


CHECK = Check(
    name="prefix cache",
    compared="answers to prompts from the prefix cache, with those to prompts that are computed, and a plain pass",
    advice="Cached prompts give other answers. Serve with --no-prefix-cache, and attach the report to an issue.",
    run=_hit,
)
