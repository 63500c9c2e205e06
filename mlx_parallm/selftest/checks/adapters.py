"""Rows of several adapters in one batch."""

from __future__ import annotations

import asyncio

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedModel

_NAMES = ("first", "second", "third")
_ROWS = ((12, 10), (90, 8), (5, 14), (40, 9), (64, 6), (23, 12), (7, 11), (131, 5))
"""Tokens of the prompt and of the answer. The rows take turns in their adapters."""


async def _mixed(tested: TestedModel) -> Outcome:
    weights = {name: tested.adapter(seed=50 + at) for at, name in enumerate(_NAMES)}
    refs = {name: await tested.publish(name, each) for name, each in weights.items()}

    async def row(at: int) -> float:
        (length, tokens), name = _ROWS[at], [None, *_NAMES][at % 4]
        prompt = tested.prompt(length, seed=60 + at)
        answer = await tested.ask(prompt, tokens, adapter=refs[name] if name else BASE_ADAPTER)
        return await tested.difference(prompt, answer, weights[name] if name else None)

    return Outcome.of(await asyncio.gather(*map(row, range(len(_ROWS)))), tested.rounding.of_logprobs)


CHECK = Check(
    name="mixed adapters",
    compared="answers of 8 rows of three adapters and the base model in one batch, with each alone in mlx-lm's layers",
    advice="Rows get another adapter's weights, or none. Serve the base model only, and attach the report to an issue.",
    run=_mixed,
)
