"""Measures decoding of 16 rows: the server against mlx-lm's bare loop, and greedy decoding against sampling.

For both sides the rate counts only the time in which all rows decode: from the first token of the row that starts last
to the last token of the row that ends first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.load import Body, closed_loop
from benchmarks.lib.peers import Peer, run_bare
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import body

ROWS = 16
TOKENS, QUICK_TOKENS = 128, 64
WARM_UP_TOKENS = 8
BARE = "bare loop, greedy"
GREEDY, HALF, TOP_P = "served, greedy", "served, half at temperature 1", "served, top-p 0.9"

Options = Mapping[str, Any]
VARIANTS: Mapping[str, Sequence[Options]] = {
    GREEDY: [{"temperature": 0}],
    HALF: [{"temperature": 0}, {"temperature": 1}],
    TOP_P: [{"temperature": 1, "top_p": 0.9}],
}


@dataclass(slots=True)
class Decode:
    """Tokens per second in each repeat, of the bare loop and of each variant of the server."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (BARE, *VARIANTS)})
    errors: list[str] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)


async def measure(ours: Peer, bare: Peer, repeats: int, quick: bool) -> Decode:
    """Runs all variants in every repeat, in an order that is reversed each time."""
    with bare.awake():
        await run_bare(bare, short_prompts(ROWS, "decode warm up"), WARM_UP_TOKENS)
    result, tokens = Decode(), QUICK_TOKENS if quick else TOKENS
    for repeat in range(repeats):
        prompts = short_prompts(ROWS, f"decode {repeat}")
        for name in result.rates if repeat % 2 == 0 else reversed(result.rates):
            rows = await (
                _bare(bare, prompts, tokens) if name == BARE else _served(ours, prompts, tokens, name, result)
            )
            result.rates[name].append(steady_rate(rows))
            print(f"  {name:<30} {result.rates[name][-1]:6.1f} tok/s", flush=True)
    return result


def steady_rate(rows: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all rows decode, from each row's token times; 0 if they never decode all at once."""
    begin, end = max(row[0] for row in rows), min(row[-1] for row in rows)
    return sum(_rate([time for time in row if begin <= time <= end]) for row in rows)


def _rate(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


async def _bare(bare: Peer, prompts: Sequence[str], tokens: int) -> list[list[float]]:
    with bare.awake():
        return await run_bare(bare, prompts, tokens)


async def _served(ours: Peer, prompts: Sequence[str], tokens: int, name: str, result: Decode) -> list[list[float]]:
    with ours.awake():
        load = await closed_loop(ours.port, _bodies(prompts, tokens, name), ROWS)
    result.errors += load.errors
    result.client_cpu.append(load.client_cpu)
    return [stream.arrivals for stream in load.streams if stream.arrivals] or [[0.0]]


def _bodies(prompts: Sequence[str], tokens: int, name: str) -> list[Body]:
    """The requests. `return_token_ids` makes every token an event, even if its text is incomplete."""
    options = VARIANTS[name]
    return [
        {**body(prompt, tokens), "seed": row, "return_token_ids": True, **options[row % len(options)]}
        for row, prompt in enumerate(prompts)
    ]
