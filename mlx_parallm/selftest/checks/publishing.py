"""A new version of an adapter that goes live while rows of the old one run."""

from __future__ import annotations

import asyncio
from typing import Any

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedAnswer, TestedModel

_NAME, _PROMPT, _ROWS, _AFTER, _MOST = "published", 20, 3, 4, 400


async def _swap(tested: TestedModel) -> Outcome:
    old, new = tested.adapter(seed=70), tested.adapter(seed=71)
    first = await tested.publish(_NAME, old)
    live, started = asyncio.Event(), [asyncio.Event() for _ in range(_ROWS)]

    async def old_row(at: int) -> tuple[float, int]:
        """How far the row is from its version, and how many tokens it sampled after the new one was live."""
        after: list[int] = []

        def count(answer: TestedAnswer) -> bool:
            started[at].set()
            after.extend([1] * live.is_set())
            return len(after) < _AFTER

        prompt = tested.prompt(_PROMPT + at, seed=72 + at)
        answer = await tested.ask(prompt, _MOST, adapter=first, on_token=count)
        return await tested.difference(prompt, answer, old), len(after)

    rows = [asyncio.create_task(old_row(at)) for at in range(_ROWS)]
    begun: asyncio.Future[Any] = asyncio.gather(*(each.wait() for each in started))
    waiting: list[asyncio.Future[Any]] = [begun, *rows]  # a row that fails never begins
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    second = await tested.publish(_NAME, new)
    live.set()
    prompt = tested.prompt(_PROMPT, seed=80)
    answer = await tested.ask(prompt, _AFTER, adapter=_live(tested))
    ran = await asyncio.gather(*rows)
    found = [await tested.difference(prompt, answer, new), *(difference for difference, _ in ran)]
    return Outcome.of(found, tested.rounding.of_logprobs, _problem(first, second, [after for _, after in ran]))


def _live(tested: TestedModel) -> AdapterRef:
    with tested.served.adapters.lease(_NAME) as ref:
        return ref


def _problem(first: AdapterRef, second: AdapterRef, tokens_after: list[int]) -> str:
    if second.version <= first.version:
        return f"the new version has the number {second.version}, after {first.version}"
    return "" if min(tokens_after) else "a row of the old version ended before the new one was live"


CHECK = Check(
    name="publish while serving",
    compared="rows of an adapter's old version that run on, and one of the new version, with each alone in mlx-lm",
    advice=(
        "A new version changes answers that are under way, or does not go live. Load adapters before requests come, do "
        "not train while you serve, and attach the report to an issue."
    ),
    run=_swap,
)
