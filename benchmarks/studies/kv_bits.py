"""Measures what quantized keys and values cost in quality, and what they save in memory, on the bundled model.

    python benchmarks/studies/kv_bits.py [--tokens 20000] [--quick] [--out benchmarks/results/kv_bits.json]

The text is the pages of `docs/`, in contexts of 2,000 tokens. Each is computed in chunks in three KV pools: one in
full, one of 8 bits and one of 4. After every token, the distribution of the next one is compared with that of the pool
in full. Then rows decode, for the time of a step. It takes about 10 minutes on two cores; --quick, a minute.

    KL                     of the distribution with the full pool to the other one, in nats, of all tokens
    same token             of how many tokens the most likely next token is the same
    bytes a token          in full blocks, by the arrays' own sizes, against float16
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np

from benchmarks.lib.figures import Figure, percentile, ratios, reported
from benchmarks.lib.machine import describe, warn_if_busy
from benchmarks.lib.report import RESULTS, setting, show, write
from mlx_parallm.app.device import build_runner
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span
from mlx_parallm.config import Setting, resolve
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.manager import SharedModelManager

DOCS = Path(__file__).parents[2] / "docs"
CONTEXT, CHUNK = 2000, 200
QUICK_TOKENS = 2000
ROWS, ROW_TOKENS, STEPS, REPEATS = 8, 500, 4, 3
MOST_KL = {8: 1.0, 4: None}
"""Thousandths of a nat."""
MOST_BYTES = {8: 0.57, 4: 0.32}


@dataclass(slots=True)
class Quality:
    """For each token of the text: the KL, and whether the most likely next token is the same."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, full: mx.array, other: mx.array) -> None:
        """Compares logits [n, vocab]."""
        full_logp, other_logp = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (full, other))
        self.kl += np.asarray((mx.exp(full_logp) * (full_logp - other_logp)).sum(-1)).tolist()
        self.same += np.asarray(full.argmax(-1) == other.argmax(-1)).tolist()


class Pools:
    """The bundled model with a pool in full and two quantized ones."""

    def __init__(self) -> None:
        self.manager = SharedModelManager()
        self._bank = self.manager.install_bank(1, 1)
        self.full, self.quantized = self._runner(None), {bits: self._runner(bits) for bits in (8, 4)}

    def _runner(self, bits: int | None) -> BatchRunner:
        keys = {"server.kv_bits": Setting(bits, "this benchmark"), "server.kv_cache_memory": Setting("1GB", "the same")}
        return build_runner(self.manager, self._bank, resolve(keys).config)

    def compare(self, tokens: Sequence[int], qualities: dict[int, Quality]) -> None:
        """Computes one context in every pool, chunk by chunk, and adds what differs."""
        rows = {runner: opened(runner, len(tokens)) for runner in (self.full, *self.quantized.values())}
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            full = computed(self.full, [rows[self.full]], chunk)
            for bits, runner in self.quantized.items():
                qualities[bits].add(full, computed(runner, [rows[runner]], chunk))
        for runner, row in rows.items():
            runner.cache.close(row)

    def step_seconds(self, runner: BatchRunner) -> float:
        """The time of a decode step of some rows. What they hold does not change it, so it is not computed."""
        rows = [opened(runner, ROW_TOKENS + 1 + STEPS) for _ in range(ROWS)]
        for row in rows:
            row.computed = ROW_TOKENS
        computed(runner, rows, range(ROWS))
        started = time.perf_counter()
        for _ in range(STEPS):
            computed(runner, rows, range(ROWS))
        seconds = (time.perf_counter() - started) / STEPS
        for row in rows:
            runner.cache.close(row)
        return seconds

    def bytes_per_token(self, bits: int) -> int:
        """Of full blocks, by the sizes of the arrays."""
        cache = self.quantized[bits].cache
        row = opened(self.quantized[bits], BLOCK_TOKENS)
        size = sum(
            array.nbytes // (group.allocator.total * BLOCK_TOKENS)
            for group in cache.groups
            for array in group.arena.arrays()
        )
        cache.close(row)
        return size

    @property
    def half_precision(self) -> int:
        """Bytes of a token's keys and values in float16."""
        layout = self.manager.plan.layout
        return layout.bytes_per_token * mx.float16.size // layout.dtype.size


def opened(runner: BatchRunner, tokens: int) -> KVRow:
    row = runner.cache.open(tokens)
    assert row is not None, "the pool is too small for the benchmark"
    return row


def computed(runner: BatchRunner, rows: Sequence[KVRow], tokens: Sequence[int]) -> mx.array:
    """Computes the next tokens of each row, as many for each. Returns the logits of all."""
    each = len(tokens) // len(rows)
    logits = runner.compute([Span(row, row.computed, each) for row in rows], list(tokens))
    mx.eval(logits, runner.cache.arrays())
    for row in rows:
        row.computed += each
    return logits


def text_of_docs(manager: SharedModelManager, tokens: int) -> list[int]:
    """The first so many tokens of the pages, in the order of their names."""
    text = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = manager.tokenizer.encode(text[: 8 * tokens])
    assert len(ids) >= tokens, "the pages have fewer tokens"
    return list(ids[:tokens])


def figures(pools: Pools, qualities: dict[int, Quality], steps: dict[int | None, list[float]]) -> Iterator[Figure]:
    for bits, quality in qualities.items():
        share = pools.bytes_per_token(bits) / pools.half_precision
        yield Figure(
            f"mean KL to the full KV cache, {bits} bits",
            "1e-3 nats",
            *reported([1e3 * float(np.mean(quality.kl))]),
            MOST_KL[bits],
        )
        yield Figure(
            f"99th percentile of the KL, {bits} bits", "1e-3 nats", *reported([1e3 * percentile(quality.kl, 99)])
        )
        yield Figure(f"same token most likely, {bits} bits", "%", *reported([100 * float(np.mean(quality.same))]))
        yield Figure(f"bytes a token, {bits} bits", "of float16", *reported([share]), MOST_BYTES[bits])
        taken = ratios(steps[bits], steps[None])
        yield Figure(f"a step of {ROWS} rows of {ROW_TOKENS} tokens, {bits} bits", "x of full", taken, taken.median)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help=f"compare {QUICK_TOKENS} tokens")
    parser.add_argument("--out", type=Path, default=RESULTS / "kv_bits.json")
    arguments = parser.parse_args()
    warn_if_busy()
    machine, pools, qualities = describe(), Pools(), {8: Quality(), 4: Quality()}
    tokens = text_of_docs(pools.manager, QUICK_TOKENS if arguments.quick else arguments.tokens)
    steps: dict[int | None, list[float]] = {None: [], 8: [], 4: []}
    for _ in range(REPEATS):
        for bits, runner in (None, pools.full), *pools.quantized.items():
            steps[bits].append(pools.step_seconds(runner))
    for start in range(0, len(tokens), CONTEXT):
        pools.compare(tokens[start : start + CONTEXT], qualities)
        print(f"{start + CONTEXT} tokens compared", file=sys.stderr)
    judged = list(figures(pools, qualities, steps))
    show(judged)
    write(
        arguments.out,
        {"machine": machine, "setting": setting(arguments), "step_seconds": {str(b): s for b, s in steps.items()}},
        judged,
    )
    return int(any(figure.met is False for figure in judged))


if __name__ == "__main__":
    sys.exit(main())
