"""Prompts that are computed in chunks."""

from __future__ import annotations

import asyncio

import numpy as np

from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import CHUNK, TestedModel

_LONG, _SHORT, _ANSWER = 2 * CHUNK + 41, CHUNK // 2 + 3, 3


async def _chunks(tested: TestedModel) -> Outcome:
    """Two prompts at the same time, whose chunks share units of work; the long one is scored too."""
    long, short = tested.prompt(_LONG, seed=10), tested.prompt(_SHORT, seed=11)
    answers = await asyncio.gather(tested.ask(long, _ANSWER, scored=True), tested.ask(short, _ANSWER))
    rows = await tested.plain_logprobs(long)
    expected = rows[np.arange(_LONG - 1), long[1:]]
    scored = [float("nan") if entry is None else entry.logprob for entry in answers[0].prompt[1:]]
    found = [float(np.abs(expected - scored).max())] if len(scored) == len(expected) else [float("nan")]
    found += [await tested.difference(long, answers[0]), await tested.difference(short, answers[1])]
    return Outcome.of(found, tested.rounding.of_logprobs)


CHECK = Check(
    name="prefill in chunks",
    compared=f"logprobs of prompts of {_LONG} and {_SHORT} tokens that are computed in chunks, with one plain pass",
    advice="Prompts are misread on this device, so all answers are wrong. Do not serve; attach the report to an issue.",
    run=_chunks,
)
