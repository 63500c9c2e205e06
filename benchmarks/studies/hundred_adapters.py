"""Measures a hundred adapters in fewer slots, beside one adapter and beside `mlx_lm.server`, which reloads its model.

    python benchmarks/studies/hundred_adapters.py [--quick] [--repeats 3] [--only "one adapter" "8 slots" "32 slots"
        "8 slots, mixed ranks" mlx_lm.server] [--against CHECKOUT] [--add] [--out FILE]

16 clients send greedy requests of 16 tokens, each when its last one has ended. The k-th adapter gets a share of them in
proportion to 1/k (Zipf). All sides get the same prompts and adapters, in turn:

one adapter             every request names the first adapter, so that nothing is swapped
8 slots, 32 slots       a hundred adapters of rank 16 on all linears
8 slots, mixed ranks    a hundred adapters of the ranks 8, 16 and 32, in slots of rank 32
mlx_lm.server           the first requests alone, which name the adapter's folder in `adapters`

With --against, a server of another checkout answers the requests for 8 and 32 slots too. It takes about 8 minutes, 4
with --quick, and 4 GB of disk. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

from benchmarks.lib import machine, peers, report
from benchmarks.lib.adapters.files import random_adapter
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, errors, percentile, ratios, reported
from benchmarks.lib.load import Body, Load, closed_loop, get, get_json, greedy
from benchmarks.lib.memory import watched
from benchmarks.lib.peers import MLX_LM, MLX_LM_FLAGS, Peer, cancelled_by_sigterm, mlx_lm_server, our_server, server_of
from benchmarks.lib.prompts import short_prompts
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.model.manager import SharedModelManager

ONE, MIXED, MIXED_RANKS = "one adapter", "8 slots, mixed ranks", (8, 16, 32)
KINDS = (ONE, "8 slots", "32 slots", MIXED, MLX_LM)
SLOTS = {ONE: 8, "8 slots": 8, "32 slots": 32, MIXED: 8}
SAME_SERVER = {ONE: "8 slots", "8 slots": ONE}
"""Sides that share a server."""
SETTLED_S = 0.5
"""After which the statistics of a server that is idle are those of now."""
NAMES = [f"tenant-{number:03}" for number in range(100)]
CLIENTS, TOKENS, ATTEMPTS = 16, 16, 20
REQUESTS, QUICK_REQUESTS, RELOADED = 64, 32, 8
WARM_UP_REQUESTS, WARM_UP_TOKENS = 24, 2


@dataclass(slots=True)
class Side:
    """One side's measurements, one value per repeat.

    `swaps`: adapters that were loaded into a slot. `stall_s`: seconds in which the device did nothing but swap.
    """

    rates: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    first_token_p95_s: list[float] = field(default_factory=list)
    requests: int = 0
    swaps: list[int] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, load: Load) -> None:
        firsts = [stream.first_token_s for stream in load.streams if stream.arrivals]
        self.rates.append(load.rate)
        self.first_token_s.append(percentile(firsts, 50))
        self.first_token_p95_s.append(percentile(firsts, 95))
        self.requests += len(load.streams)
        self.errors += load.errors


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    machine.warn_if_busy()
    before = machine.describe()
    with tempfile.TemporaryDirectory(prefix="hundred_adapters_") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(peers.PROGRAMS / "model_dir.py"), str(folder / "model")], check=True)
        alone(write_adapters, folder, MIXED in arguments.only)
        sides = _earlier(arguments) if arguments.add else {}
        asyncio.run(cancelled_by_sigterm(_measure(arguments, folder, sides)))
    figures = [figure for name, side in sides.items() for figure in _figures(name, side, sides)]
    report.show(figures)
    record = {
        "machine": before,
        "setting": report.setting(arguments),
        "sides": {k: asdict(v) for k, v in sides.items()},
    }
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def write_adapters(folder: Path, mixed: bool) -> None:
    """Writes a hundred adapters of rank 16 and, if they are to be mixed, a hundred of other ranks."""
    layout = SharedModelManager(progress=False).adapter_layout
    for kind, ranks in {"same": (16,), **({"mixed": MIXED_RANKS} if mixed else {})}.items():
        for seed, (name, rank) in enumerate(zip(NAMES, cycle(ranks))):
            write_mlx_lm(folder / kind / name, random_adapter(layout, seed, rank), layout)


def _earlier(arguments: argparse.Namespace) -> dict[str, Side]:
    """The measurements in the record of an earlier run."""
    sides = json.loads(arguments.out.read_text())["sides"]
    return {name: Side(**side) for name, side in sides.items()}


async def _measure(arguments: argparse.Namespace, folder: Path, sides: dict[str, Side]) -> None:
    """Adds the repeats of one run to the measurements."""
    repeats, count = (1, QUICK_REQUESTS) if arguments.quick else (arguments.repeats, REQUESTS)
    before = max((len(side.rates) for side in sides.values()), default=0)
    async with AsyncExitStack() as stack:
        servers = await _servers(arguments, folder, stack)
        for repeat in (-1, *range(before, before + repeats)):  # the first one warms up
            for name in servers if repeat % 2 == 0 else reversed(servers):
                bodies = _requests(name, repeat, count if repeat >= 0 else WARM_UP_REQUESTS, folder)
                side = sides.setdefault(name, Side()) if repeat >= 0 else Side()
                await _take_turn(name, servers[name], side, bodies)


async def _servers(arguments: argparse.Namespace, folder: Path, stack: AsyncExitStack) -> dict[str, Peer]:
    """The server of each side, stopped."""
    servers: dict[str, Peer] = {}
    for name in arguments.only:
        if name == MLX_LM:
            start = mlx_lm_server(folder / "model", MLX_LM_FLAGS.split(), folder)
            servers[name] = await stack.enter_async_context(start)
        elif (same := SAME_SERVER.get(name)) in servers:
            servers[name] = servers[same]
        else:
            servers[name] = await stack.enter_async_context(_ours(name, folder))
        if arguments.against and name in ("8 slots", "32 slots"):
            before = _ours(name, folder, arguments.against)
            servers[f"{name}, before"] = await stack.enter_async_context(before)
    for server in servers.values():
        with server.awake():
            pass
    return servers


@asynccontextmanager
async def _ours(name: str, folder: Path, checkout: Path | None = None) -> AsyncIterator[Peer]:
    """A server of the adapters, of this checkout or of another one."""
    adapters = folder / ("mixed" if name == MIXED else "same")
    rank = max(MIXED_RANKS) if name == MIXED else 16
    flags = ["--adapter-dir", str(adapters), "--max-loras", str(SLOTS[name]), "--max-lora-rank", str(rank)]
    logs = folder / f"{name}, {'before' if checkout else 'now'}"
    logs.mkdir()
    model = folder / "model"
    async with server_of(checkout, model, logs, flags) if checkout else our_server(model, logs, flags) as peer:
        yield peer


async def _take_turn(name: str, server: Peer, side: Side, bodies: Sequence[Body]) -> None:
    attempts = ATTEMPTS if name == MLX_LM else 1
    with server.awake():
        if name == MLX_LM:
            side.add(await closed_loop(server.port, bodies, CLIENTS, attempts))
        else:
            before = await _swapped(server)
            async with watched(server) as memory:
                side.add(await closed_loop(server.port, bodies, CLIENTS, attempts))
            after = await _swapped(server)
            side.peak_bytes.append(memory.peak_bytes)
            side.resident_bytes.append(memory.resident_bytes_most)
            side.swaps.append(after[0] - before[0])
            side.stall_s.append(after[1] - before[1])
    print(f"  {name:<22} {side.rates[-1]:6.1f} tok/s, first token {side.first_token_s[-1]:.2f} s", flush=True)


async def _swapped(server: Peer) -> tuple[int, float]:
    """How many adapters the server has brought into a slot, and the seconds that its device has spent on that."""
    await asyncio.sleep(SETTLED_S)
    lines = (await get(server.port, "/metrics")).decode().splitlines()
    staged = next(line for line in lines if line.startswith("mlx_parallm_lora_staged_total"))
    state = await get_json(server.port, "/debug/state")
    return int(float(staged.split()[-1])), float(state["engine"]["device_seconds"]["other"])


def _requests(name: str, repeat: int, count: int, folder: Path) -> list[Body]:
    """The requests of one repeat, the same for all sides but for how they name their adapter."""
    dice = random.Random(repeat)
    chosen = dice.choices(NAMES, [1 / place for place in range(1, len(NAMES) + 1)], k=count)
    tokens = TOKENS if repeat >= 0 else WARM_UP_TOKENS
    bodies = [{"prompt": prompt, **greedy(tokens)} for prompt in short_prompts(count, f"hundred {repeat}")]
    if name == MLX_LM:
        model, adapters = str(folder / "model"), folder / "same"
        bodies = bodies[: RELOADED if repeat >= 0 else 1]
        return [
            {**body, "model": model, "adapters": str(adapters / a)} for body, a in zip(bodies, chosen, strict=False)
        ]
    if name == ONE:
        chosen = NAMES[:1] * count
    return [{**body, "ignore_eos": True, "model": adapter} for body, adapter in zip(bodies, chosen, strict=True)]


def _figures(name: str, side: Side, sides: Mapping[str, Side]) -> Iterator[Figure]:
    yield Figure(f"{name}: tokens per second", "tok/s", *reported(side.rates))
    yield Figure(f"{name}: first token, median", "s", *reported(side.first_token_s))
    yield Figure(f"{name}: first token, 95th percentile", "s", *reported(side.first_token_p95_s))
    if side.swaps:
        each = side.requests / len(side.swaps)
        yield Figure(
            f"{name}: requests that needed no swap", "%", *reported([100 * (1 - n / each) for n in side.swaps])
        )
        stalls = zip(side.stall_s, side.swaps, strict=True)
        yield Figure(f"{name}: device time of a swap", "ms", *reported([1e3 * s / n for s, n in stalls if n]))
        peaks, resident = ([size / 1e6 for size in sizes] for sizes in (side.peak_bytes, side.resident_bytes))
        yield Figure(f"{name}: peak of MLX's memory", "MB", *reported(peaks))
        yield Figure(f"{name}: resident memory", "MB", *reported(resident))
    for other in (ONE, f"{name}, before", MLX_LM):
        if other in sides and other != name and not name.endswith("before"):
            gain = ratios(side.rates, sides[other].rates)
            which = other.removeprefix(f"{name}, ")
            yield Figure(f"{name}: tokens per second against {which}", "x", gain, gain.median)
            waits = ratios(side.first_token_p95_s, sides[other].first_token_p95_s)
            yield Figure(f"{name}: first token, 95th percentile, against {which}", "x", waits, waits.median)
    yield errors(f"{name}: errors", len(side.errors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one repeat of {QUICK_REQUESTS} requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--against", type=Path, help="a checkout with a .venv")
    parser.add_argument("--add", action="store_true", help="add the repeats to those in the record")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "hundred_adapters.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
