"""How long the parts of the engine take on this machine. One measurement each: they tell orders of magnitude."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from mlx_parallm.selftest.checks.training import policy_of, update
from mlx_parallm.selftest.inputs import answers
from mlx_parallm.selftest.tested import CHUNK, TestedModel

_ROWS = (1, 8, 16)
_STEPS, _PROMPT, _CHUNKS = 14, 24, 3
_SAMPLES, _SAMPLE_TOKENS = 8, 24


@dataclass(frozen=True, slots=True)
class Timing:
    """One part. `tokens_per_s`: of all rows. `bytes_per_s`: of weights that it reads once; None where neither means
    anything."""

    name: str
    seconds: float
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the report's file."""
        return asdict(self)


async def timings(tested: TestedModel) -> tuple[Timing, ...]:
    """The times of decode steps, of a chunk of a prompt, of a micro-step and of publishing."""
    steps = [await _decode_step(tested, rows) for rows in _ROWS]
    return (*steps, await _prefill_chunk(tested), await _micro_step(tested), await _publish(tested))


async def _decode_step(tested: TestedModel, rows: int) -> Timing:
    """The median time between two tokens of the row that begins last."""
    prompts = [tested.prompt(_PROMPT, seed=200 + at) for at in range(rows)]
    ended = await asyncio.gather(*(tested.ask(prompt, _STEPS) for prompt in prompts))
    last = max(ended, key=lambda answer: answer.times[0])
    step = statistics.median(later - at for at, later in pairwise(last.times))
    weights = tested.served.card.weight_bytes
    name = "decode step, 1 row" if rows == 1 else f"decode step, {rows} rows"
    return Timing(name, step, tokens_per_s=rows / step, bytes_per_s=weights / step)


async def _prefill_chunk(tested: TestedModel) -> Timing:
    answer = await tested.ask(tested.prompt(_CHUNKS * CHUNK, seed=220), 1)
    seconds = answer.prefill_s / _CHUNKS
    return Timing(f"prefill chunk of {CHUNK} tokens", seconds, tokens_per_s=CHUNK / seconds)


async def _micro_step(tested: TestedModel) -> Timing:
    """The device's time for one update, which is one micro-step of answers that share a prompt."""
    policy = await policy_of(tested, tested.adapter(seed=230))
    batch = answers(tested.vocab_size, (_SAMPLE_TOKENS,) * _SAMPLES, seed=231, shared_prompt=2 * _PROMPT)
    outcome = await update(tested, policy, batch)
    seconds, tokens = outcome.metrics["device_seconds"], _SAMPLES * _SAMPLE_TOKENS
    return Timing(f"micro-step of {tokens} trained tokens", seconds, tokens_per_s=tokens / seconds)


async def _publish(tested: TestedModel) -> Timing:
    weights = tested.adapter(seed=240)
    started = time.perf_counter()
    await tested.publish("timed", weights)
    seconds = time.perf_counter() - started
    return Timing("publish an adapter version", seconds, bytes_per_s=weights.nbytes / seconds)
