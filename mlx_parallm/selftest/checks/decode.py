"""Rows of different lengths that decode together, and join while others run."""

from __future__ import annotations

import asyncio

from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedAnswer, TestedModel

_FIRST = ((3, 24), (70, 20), (17, 12), (140, 16))
_LATER = ((1, 14), (33, 9), (64, 5), (65, 7))
"""Tokens of the prompt and of the answer, of each row."""


async def _batch(tested: TestedModel) -> Outcome:
    under_way = asyncio.Event()

    def count(answer: TestedAnswer) -> bool:
        if len(answer.tokens) >= 4:
            under_way.set()
        return True

    async def row(at: int, later: bool) -> float:
        length, tokens = (_LATER if later else _FIRST)[at]
        if later:
            await under_way.wait()
        prompt = tested.prompt(length, seed=20 + 10 * later + at)
        answer = await tested.ask(prompt, tokens, on_token=count)
        return await tested.difference(prompt, answer)

    rows = [row(at, later) for later in (False, True) for at in range(4)]
    return Outcome.of(await asyncio.gather(*rows), tested.rounding.of_logprobs)


CHECK = Check(
    name="batched decode",
    compared="greedy answers of 8 rows at different offsets, some of which join later, with a plain pass over each",
    advice=(
        "Rows that are answered together disturb each other. Serve one request at a time (--max-batch-size 1), and "
        "attach the report to an issue."
    ),
    run=_batch,
)
