"""Compares this server with mlx_lm.server, and with mlx-lm's batch loop without HTTP.

    python benchmarks/serving.py [--quick] [--repeats 3] [--only throughput decode fairness memory]
        [--peer-flags "--decode-concurrency 32 --prompt-concurrency 8"] [--out FILE]
    python benchmarks/serving.py --against CHECKOUT --out FILE      throughput beside the server of another checkout

All sides use one model directory (the bundled model in float32) and one BLAS. They take turns, and every figure is a
median of repeats. It takes about 15 minutes on two cores, 3 with --quick, prints a table and writes JSON. Nothing else
should run on the machine meanwhile.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib import machine, peers, report, throughput
from benchmarks.lib.figures import Figure
from benchmarks.lib.load import closed_loop
from benchmarks.lib.memory import Memory, watched
from benchmarks.lib.programs.model_dir import kv_bytes_per_token
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.serving import decode, fairness, figures, tables
from benchmarks.lib.serving.decode import Decode
from benchmarks.lib.serving.fairness import Fairness
from benchmarks.lib.throughput import Point

RECORD = report.RESULTS / "serving.json"
SCENARIOS = ("throughput", "decode", "fairness", "memory")
MEMORY_CLIENTS = 16


@dataclass(slots=True)
class Results:
    """The measurements of the scenarios that ran."""

    bytes_per_token: int
    points: list[Point] = field(default_factory=list)
    decode: Decode | None = None
    fairness: Fairness | None = None
    memory: dict[str, Memory] = field(default_factory=dict)

    def tables(self) -> Iterator[Table]:
        if self.points:
            yield tables.throughput(self.points)
        if self.decode:
            yield tables.decode(self.decode.rates)

    def judged(self) -> Iterator[Figure]:
        if self.points:
            yield from figures.of_throughput(self.points)
        if self.decode:
            yield from figures.of_decode(self.decode)
        if self.fairness:
            yield from figures.of_fairness(self.fairness)
        for name, measured in self.memory.items():
            yield from figures.of_memory(name, measured, self.bytes_per_token)

    def record(self) -> dict[str, Any]:
        """The measurements as JSON, with one value per repeat."""
        return {
            "throughput": [asdict(point) for point in self.points],
            "decode": asdict(self.decode) if self.decode else None,
            "fairness": asdict(self.fairness) if self.fairness else None,
            "memory": {name: measured.record() for name, measured in self.memory.items()},
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of one run."""

    arguments: argparse.Namespace
    model: Path
    logs: Path

    async def run(self) -> Results:
        results = Results(kv_bytes_per_token(self.model))
        scenarios = {
            "throughput": self._throughput,
            "decode": self._decode,
            "fairness": self._fairness,
            "memory": self._memory,
        }
        for name in self.arguments.only:
            print(name, flush=True)
            await scenarios[name](results)
        return results

    async def _throughput(self, results: Results) -> None:
        other = self.arguments.against
        flags = shlex.split(self.arguments.peer_flags)
        async with (
            peers.our_server(self.model, self.logs) as ours,
            peers.server_of(other, self.model, self.logs)
            if other
            else peers.mlx_lm_server(self.model, flags, self.logs) as theirs,
        ):
            for peer in (ours, theirs):
                await throughput.warm_up(peer)
            results.points = await throughput.measure(ours, theirs, self._repeats, self.arguments.quick)

    async def _decode(self, results: Results) -> None:
        async with (
            peers.our_server(self.model, self.logs) as ours,
            peers.bare_loop(self.model, self.logs) as bare,
        ):
            await throughput.warm_up(ours)
            results.decode = await decode.measure(ours, bare, self._repeats, self.arguments.quick)

    async def _fairness(self, results: Results) -> None:
        """Measures fairness and its memory. The server is not warmed up, so that the memory is this scenario's
        alone."""
        async with peers.our_server(self.model, self.logs) as ours, watched(ours) as measured:
            results.fairness = await fairness.measure(ours, max(1, self._repeats - 1))
        results.memory["fairness"] = measured

    async def _memory(self, results: Results) -> None:
        """Measures memory with 16 clients on a new server, because MLX's peak covers a server's whole life."""
        prompts = short_prompts(2 * MEMORY_CLIENTS, "memory")
        bodies = [throughput.body(prompt, throughput.TOKENS) for prompt in prompts]
        async with peers.our_server(self.model, self.logs) as ours, watched(ours) as measured:
            await closed_loop(ours.port, bodies, MEMORY_CLIENTS)
        results.memory[f"{MEMORY_CLIENTS} clients"] = measured

    @property
    def _repeats(self) -> int:
        return 1 if self.arguments.quick else self.arguments.repeats


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="serving_benchmark_") as folder:
        bench = Bench(arguments, Path(folder) / "model", Path(folder))
        subprocess.run([sys.executable, str(peers.PROGRAMS / "model_dir.py"), str(bench.model)], check=True)
        before = machine.describe()
        machine.warn_if_busy()
        results = asyncio.run(peers.cancelled_by_sigterm(bench.run()))
    judged = list(results.judged())
    report.show(judged, *results.tables())
    record = {"machine": before, "setting": report.setting(arguments), **results.record()}
    report.write(arguments.out, record, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of fewer and shorter requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--peer-flags", default=peers.MLX_LM_FLAGS, help="of mlx_lm.server")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--against", type=Path, help="a checkout with a .venv, in place of mlx_lm.server")
    arguments = parser.parse_args()
    if arguments.against:
        if arguments.out == RECORD or tuple(arguments.only) not in (SCENARIOS, ("throughput",)):
            parser.error("--against measures throughput only, and needs an --out of its own")
        arguments.only = ("throughput",)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
