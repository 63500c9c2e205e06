"""Measures streaming rows and short requests while a long prompt is prefilled.

8 rows stream ──────┬── prefill of the long prompt ──┬──▶ then all are closed
  quiet steps       └─ a short request, now and then
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from benchmarks.lib.load import Stream
from benchmarks.lib.peers import Peer
from benchmarks.lib.prompts import long_prompt, short_prompts
from benchmarks.lib.throughput import body

ROWS, ROW_TOKENS = 8, 4000
LONG_PROMPT_TOKENS, LONG_MAX_TOKENS = 4000, 4
QUIET_STEPS = 24
SHORTS_AT_S = (1.0, 4.0, 8.0)
SHORT_TOKENS = 8
TICK_S = 0.05
LIMIT_S = 300


@dataclass(slots=True)
class Fairness:
    """Seconds in each repeat. A gap is the time between two tokens of one streaming row.

    `quiet_step_s` and `busy_step_s` are the median gaps before and during the long prompt's prefill. `longest_gap_s` is
    the longest gap of any row during it, `short_first_token_s` the longest time to a short request's first token.
    """

    quiet_step_s: list[float] = field(default_factory=list)
    busy_step_s: list[float] = field(default_factory=list)
    longest_gap_s: list[float] = field(default_factory=list)
    long_first_token_s: list[float] = field(default_factory=list)
    short_first_token_s: list[float] = field(default_factory=list)
    shorts: int = 0
    errors: list[str] = field(default_factory=list)


async def measure(ours: Peer, repeats: int) -> Fairness:
    """Measures a server that runs alone. A failed repeat is counted in the result's errors."""
    result = Fairness()
    for repeat in range(repeats):
        try:
            async with asyncio.timeout(LIMIT_S):
                await _repeat(ours.port, repeat, result)
        except* OSError as failed:
            result.errors += [f"{type(error).__name__}: {error}" for error in failed.exceptions]
    return result


async def _repeat(port: int, repeat: int, result: Fairness) -> None:
    prompts = short_prompts(ROWS + len(SHORTS_AT_S), f"fairness {repeat}")
    rows = [_stream(port, prompt, ROW_TOKENS) for prompt in prompts[:ROWS]]
    long = _stream(port, long_prompt(LONG_PROMPT_TOKENS, f"long {repeat}"), LONG_MAX_TOKENS)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(row.run()) for row in rows]
        while any(len(row.arrivals) < QUIET_STEPS for row in rows):
            await asyncio.sleep(TICK_S)
        shorts = await _beside(group, long, [_stream(port, prompt, SHORT_TOKENS) for prompt in prompts[ROWS:]])
        for task in running:
            task.cancel()
    _note(rows, long, shorts, result)


async def _beside(group: asyncio.TaskGroup, long: Stream, shorts: Sequence[Stream]) -> list[Stream]:
    """Sends the long request, and short ones during its prefill. Returns the short ones when all are answered."""
    tasks, waiting = [group.create_task(long.run())], list(zip(SHORTS_AT_S, shorts, strict=True))
    sent: list[Stream] = []
    while not long.arrivals:
        if waiting and long.sent and time.perf_counter() - long.sent >= waiting[0][0]:
            sent.append(waiting.pop(0)[1])
            tasks.append(group.create_task(sent[-1].run()))
        await asyncio.sleep(TICK_S)
    await asyncio.wait(tasks)
    return sent


def _note(rows: Sequence[Stream], long: Stream, shorts: Sequence[Stream], result: Fairness) -> None:
    begin, end = long.sent, long.arrivals[0]
    busy = [gap for row in rows for gap in _gaps(row.arrivals, begin, end)]
    settled = max(row.arrivals[0] for row in rows)  # before that time, rows wait for each other's prefill
    result.quiet_step_s.append(median(gap for row in rows for gap in _gaps(row.arrivals, settled, begin)))
    result.busy_step_s.append(median(busy))
    result.longest_gap_s.append(max(busy))
    result.long_first_token_s.append(long.first_token_s)
    result.short_first_token_s += [max(short.first_token_s for short in shorts)] if shorts else []
    result.shorts += len(shorts)
    print(
        f"  longest gap {1e3 * max(busy):.0f} ms, quiet step {1e3 * result.quiet_step_s[-1]:.0f} ms, "
        f"long prompt's first token {long.first_token_s:.1f} s",
        flush=True,
    )


def _gaps(arrivals: Sequence[float], begin: float, end: float) -> list[float]:
    """The gaps that overlap the interval, in full length."""
    return [after - before for before, after in pairwise(arrivals) if after > begin and before < end]


def _stream(port: int, prompt: str | list[int], max_tokens: int) -> Stream:
    """A streaming request. `return_token_ids` makes every token an event, even if its text is incomplete."""
    return Stream(port, {**body(prompt, max_tokens), "return_token_ids": True})
