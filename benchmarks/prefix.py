"""Measures what a prefix cache saves, beside mlx_lm.server and beside this server without its cache.

    python benchmarks/prefix.py [--quick] [--hybrid] [--alignments 64] [--repeats 3] [--only turns chat agent shared]
        [--peer-flags "--decode-concurrency 32 --prompt-concurrency 8"] [--out FILE]

`turns`: the first token of a chat's second turn over a history of 750 to 813 tokens, and of another user's request with
the same system prompt, at the 64 places where a history can end in a block of 64 tokens. `chat`: 8 users with one
system prompt take 6 turns each. `agent`: 20 calls, whose prompt grows to 4,000 tokens. `shared`: throughput of 16
clients whose prompts begin with the same 500 tokens.

All servers use one model directory (the bundled model in float32), its chat template and one BLAS, and they take turns.
With --hybrid it is a small model of random weights with recurrent layers, to see how many tokens the second turn and
the other user find: `second_cached` and `other_cached`. The other user's prompt is the second one with its system
prompt.
The variant without a cache is left out if `mlx_parallm_serve` has no flag `--no-prefix-cache`.

mlx_lm.server keeps the keys and values of at most 10 finished conversations (`--prompt-cache-size`). A new prompt gets
a copy of the longest beginning that it shares with one of them, to the token. A conversation that goes on replaces its
earlier entry; beyond 10, the entry stored first is dropped, however often it was used.

It takes about an hour on two cores, some minutes with --quick, prints tables and writes JSON. Nothing else should run
on the machine meanwhile.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from benchmarks.lib import machine, peers, report, throughput
from benchmarks.lib.figures import Figure
from benchmarks.lib.prefix import figures, replay, shared, tables, turns
from benchmarks.lib.prefix.replay import Replayed
from benchmarks.lib.prefix.shared import Shared
from benchmarks.lib.prefix.sides import OURS, THEIRS, WITHOUT, Side
from benchmarks.lib.prefix.texts import Texts
from benchmarks.lib.prefix.turns import BLOCK, Turns

PARTS = ("turns", "chat", "agent", "shared")
NO_CACHE_FLAG = "--no-prefix-cache"
QUICK_ALIGNMENTS = 4
REPLAYS = {"chat": ("Chat", replay.chat), "agent": ("Agent", replay.agent)}


@dataclass(slots=True)
class Results:
    """The measurements of the parts that ran, by part and server."""

    turns: dict[str, Turns] = field(default_factory=dict)
    replays: dict[str, dict[str, Replayed]] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)

    def tables(self) -> Iterator[Table]:
        if self.turns:
            yield tables.turns(self.turns.values())
        for name, replayed in self.replays.items():
            yield tables.replay(REPLAYS[name][0], replayed.values())
        if self.shared:
            yield tables.shared(self.shared.values())

    def judged(self) -> Iterator[Figure]:
        if self.turns:
            yield from figures.of_turns(self.turns)
        for name, replayed in self.replays.items():
            yield from figures.of_replay(name, replayed)
        if self.shared:
            yield from figures.of_shared(self.shared)


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of one run."""

    arguments: argparse.Namespace
    model: Path
    logs: Path

    async def run(self) -> Results:
        results = Results()
        async with self._sides() as sides:
            for name in self.arguments.only:
                print(name, flush=True)
                await self._part(name, sides, results)
        return results

    async def _part(self, name: str, sides: list[Side], results: Results) -> None:
        repeats, quick = self._repeats, self.arguments.quick
        if name == "turns":
            alignments = QUICK_ALIGNMENTS if quick else self.arguments.alignments
            results.turns = await turns.measure(sides, Texts(self.model), alignments, repeats)
        elif name == "shared":
            results.shared = await shared.measure(sides, repeats, quick)
        else:
            _, scripts = REPLAYS[name]
            replays = [scripts(repeat, quick) for repeat in range(repeats)]
            results.replays[name] = await replay.measure(sides, replays)

    @asynccontextmanager
    async def _sides(self) -> AsyncIterator[list[Side]]:
        """Starts all servers, and stops each until its turn."""
        flags = shlex.split(self.arguments.peer_flags)
        async with AsyncExitStack() as stack:
            ours = await stack.enter_async_context(peers.our_server(self.model, self.logs))
            sides = [Side(OURS, ours)]
            await throughput.warm_up(ours)
            if peers.our_server_has(NO_CACHE_FLAG):
                without = await stack.enter_async_context(peers.our_server(self.model, self.logs, [NO_CACHE_FLAG]))
                sides.append(Side(WITHOUT, without))
                await throughput.warm_up(without)
            else:
                print(f"mlx_parallm_serve has no flag {NO_CACHE_FLAG}: measured without that variant", flush=True)
            theirs = await stack.enter_async_context(peers.mlx_lm_server(self.model, flags, self.logs))
            sides.append(Side(THEIRS, theirs, throughput.PEER_ATTEMPTS))
            await throughput.warm_up(theirs)
            yield sides

    @property
    def _repeats(self) -> int:
        return 1 if self.arguments.quick else self.arguments.repeats


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="prefix_benchmark_") as folder:
        bench = Bench(arguments, Path(folder) / "model", Path(folder))
        hybrid = ["--hybrid"] if arguments.hybrid else []
        subprocess.run([sys.executable, str(peers.PROGRAMS / "model_dir.py"), str(bench.model), *hybrid], check=True)
        before = machine.describe()
        machine.warn_if_busy()
        results = asyncio.run(peers.cancelled_by_sigterm(bench.run()))
    judged = list(results.judged())
    report.show(judged, *results.tables())
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **asdict(results)}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, 4 alignments and shorter conversations")
    parser.add_argument(
        "--hybrid", action="store_true", help="a small model with recurrent layers, to count what is found"
    )
    parser.add_argument("--alignments", type=int, default=BLOCK, help="of the history to a block, at most 64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peer-flags", default=peers.MLX_LM_FLAGS, help="of mlx_lm.server")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "prefix.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
