"""Measures how much memory the KV pool holds for the tokens that rows use, in simulated traffic.

    python benchmarks/studies/kv_memory.py [--steps 2400] [--out benchmarks/results/kv_memory.json]

No model runs: rows open, grow by a token a step and close as requests would, in the real pool with tiny blocks, and the
pool tidies up as it does between units. Held memory is that of all blocks except those that only the prefix cache
keeps; used memory is that of the tokens in rows. The result does not depend on the machine.

    chat               up to 24 rows; prompts of 10 to 3,500 tokens (log-normal), answers of about 150
    burst, straggler   every 600 steps 32 requests at once, and 2 that run on for 550 steps
    groups of 8        prompts of 100 to 800 tokens, 8 answers each, which share the prompt
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from rich.table import Table

from benchmarks.lib.figures import Figure, percentile, reported
from benchmarks.lib.machine import describe
from benchmarks.lib.report import RESULTS, show, write
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.layer_state import KVLayout, LayerSpec

LAYOUT = KVLayout((LayerSpec(1, 1, 1),), mx.float32)
LONGEST = 4096
BUDGET_TOKENS = 1 << 15
WARM_UP = 0.25
"""The first part of the steps, in which the prefix cache fills the budget, is not counted."""
QUIET_STEPS = {False: 100, True: 600}
"""About ten seconds of decode steps, and a minute if prefixes are cached; see `engine.memory`."""
TIDY_BYTES = 64 * LAYOUT.bytes_per_token * 64
LIMIT = 1.15


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: tokens of its prompt and of each of its answers."""

    prompt: int
    answers: tuple[int, ...]


Traffic = Callable[[random.Random, int, int], list[Arrival]]
"""(random numbers, step, live rows) → the requests that arrive."""


def chat(rng: random.Random, _step: int, live: int) -> list[Arrival]:
    if live >= 24 or rng.random() >= 0.3:
        return []
    prompt = min(3500, int(rng.lognormvariate(5.5, 1.0)) + 10)
    return [Arrival(prompt, (min(500, 1 + int(rng.expovariate(1 / 150))),))]


def burst(rng: random.Random, step: int, _live: int) -> list[Arrival]:
    if step % 600:
        return []
    many = [Arrival(rng.randint(100, 900), (rng.randint(40, 120),)) for _ in range(32)]
    return [*many, *[Arrival(300, (550,))] * 2]


def groups(rng: random.Random, _step: int, live: int) -> list[Arrival]:
    if live > 16:
        return []
    return [Arrival(rng.randint(100, 800), tuple(1 + int(rng.expovariate(1 / 120)) for _ in range(8)))]


TRAFFIC: dict[str, Traffic] = {"chat": chat, "burst, straggler": burst, "groups of 8": groups}


@dataclass(slots=True)
class Held:
    """Held over used memory after every step with rows, and while only stragglers run."""

    ratios: list[float] = field(default_factory=list)
    straggling: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ratios)


class Pool:
    """A pool and its rows, of which each has an end.

    Args:
        keeps: whether there is a prefix cache. No two prompts are alike, so it only takes memory.
    """

    def __init__(self, keeps: bool) -> None:
        device = DeviceMemory(BUDGET_TOKENS * LAYOUT.bytes_per_token)
        self.cache = LoRABatchedKVCache(LAYOUT, device, LONGEST, keep_prefixes=keeps)
        self.rows: dict[KVRow, tuple[int, list[int]]] = {}  # the length at which each ends, and its ids
        self._ids = iter(range(1 << 40))
        self._quiet = 0  # steps since a row opened

    def arrive(self, arrival: Arrival) -> None:
        self._quiet = 0
        ids = [next(self._ids) for _ in range(arrival.prompt)]
        first = self.cache.open(arrival.prompt, "root", ids)
        assert first is not None
        self._add(first, arrival.prompt, arrival.answers[0], ids)
        for tokens in arrival.answers[1:]:
            fork = self.cache.fork(first, arrival.prompt - 1, arrival.prompt)
            assert fork is not None
            self._add(fork, arrival.prompt, tokens, list(ids))

    def step(self) -> None:
        """One token more in each row; rows that are at their end close."""
        for row, (end, ids) in list(self.rows.items()):
            if row.computed >= end:
                self.cache.close(row, "root", ids)
                del self.rows[row]
                continue
            assert self.cache.extend(row, row.computed + 1)
            row.computed += 1
            ids.append(next(self._ids))
            self.cache.freeze(row, "root", ids)
        self._quiet += 1
        self.cache.tidy(TIDY_BYTES, quiet=self._quiet > QUIET_STEPS[self.cache.bytes_cached > 0])

    @property
    def ratio(self) -> float:
        return self.cache.bytes_held / (self.cache.tokens_used * LAYOUT.bytes_per_token)

    def _add(self, row: KVRow, computed: int, answer: int, ids: list[int]) -> None:
        row.computed = computed
        self.cache.freeze(row, "root", ids)
        self.rows[row] = (min(computed + answer, LONGEST), ids)


def simulate(traffic: Traffic, steps: int, keeps: bool) -> Held:
    rng, pool, held = random.Random(1), Pool(keeps), Held()
    for step in range(steps):
        for arrival in traffic(rng, step, len(pool.rows)):
            pool.arrive(arrival)
        pool.step()
        if pool.rows and step > WARM_UP * steps:
            held.ratios.append(pool.ratio)
            if traffic is burst and step % 600 > 300:
                held.straggling.append(pool.ratio)
    return held


def figures(results: dict[str, Held]) -> Iterator[Figure]:
    for name, held in results.items():
        yield Figure(f"held / used on average, {name}", "x", *reported([held.mean]), LIMIT)
        if held.straggling:
            yield Figure(f"stragglers, {name}", "x", *reported(held.straggling), LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--out", type=Path, default=RESULTS / "kv_memory.json")
    arguments = parser.parse_args()
    results = {
        f"{name}, {'with' if keeps else 'without'} a prefix cache": simulate(traffic, arguments.steps, keeps)
        for name, traffic in TRAFFIC.items()
        for keeps in (False, True)
    }
    table = Table("traffic", title="Held / used memory over the steps")
    for header in ("mean", "95 %", "most"):
        table.add_column(header, justify="right")
    for name, held in results.items():
        table.add_row(name, *(f"{r:.2f}" for r in (held.mean, percentile(held.ratios, 95), max(held.ratios))))
    judged = list(figures(results))
    show(judged, table)
    write(arguments.out, {"machine": describe(), "steps": arguments.steps}, judged)


if __name__ == "__main__":
    main()
