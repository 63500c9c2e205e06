"""Measures what one API key can do to another one.

    python benchmarks/studies/fairness.py [--flood 500] [--probes 12] [--seconds 40] [--repeats 3] [--out FILE]

The server is a real one with the bundled model, a batch of 16 rows and three keys. Each repeat measures, in one run:

- the time to the first token of one key's requests, one at a time, on the quiet server and then beside another key that
  has sent `--flood` requests at once;
- the shares of two keys that both flood the server: the tokens of their answers within `--seconds`.

It takes about 6 minutes on two cores. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, percentile, ratios, spread
from benchmarks.lib.load import Stream, greedy
from benchmarks.lib.prompts import long_prompt, short_prompts
from mlx_parallm.server.access import Role, new_key, write_keys

ROWS = 16
FLOOD_TOKENS, PROBE_TOKENS, PROBE_PROMPT = 64, 4, 256
SETTLE_S, PAUSE_S = 4.0, 0.2
FIRST_TOKEN_LIMIT, SHARE_LIMIT = 2.0, 0.1
NAMES = ("one", "other")


@dataclass(frozen=True, slots=True)
class Measured:
    """One repeat: seconds to each probe's first token, and the tokens of each key that floods."""

    quiet: list[float]
    beside: list[float]
    tokens: dict[str, int]

    @property
    def share(self) -> float:
        return self.tokens[NAMES[0]] / sum(self.tokens.values())


@asynccontextmanager
async def flooding(port: int, keys: Sequence[str], count: int, seed: str) -> AsyncIterator[list[list[Stream]]]:
    """Sends so many requests with each key at once, in turns, and disconnects at the end of the block. Yields the
    streams of each key."""
    streams = [[_answer(port, key, prompt) for prompt in short_prompts(count, f"{seed} {key}")] for key in keys]
    tasks = [asyncio.create_task(stream.run()) for turn in zip(*streams, strict=True) for stream in turn]
    await asyncio.sleep(SETTLE_S)
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def _answer(port: int, key: str, prompt: str) -> Stream:
    return Stream(port, {"prompt": prompt, "ignore_eos": True, **greedy(FLOOD_TOKENS)}, key)


async def first_tokens(port: int, key: str, count: int, seed: str) -> list[float]:
    """Seconds to the first token of so many requests, one at a time, each with a prompt of its own."""
    taken = []
    for number in range(count):
        prompt = long_prompt(PROBE_PROMPT, f"{seed} {number}")
        probe = Stream(port, {"prompt": prompt, "ignore_eos": True, **greedy(PROBE_TOKENS)}, key)
        await probe.run()
        taken.append(probe.first_token_s)
        await asyncio.sleep(PAUSE_S)
    return taken


async def shares(port: int, keys: dict[str, str], count: int, seconds: float, seed: str) -> dict[str, int]:
    """Tokens that each of two keys gets within `seconds` after both have begun to flood the server."""
    async with flooding(port, list(keys.values()), count, seed) as streams:
        await asyncio.sleep(seconds)
        arrived = [sum(len(stream.arrivals) for stream in of_key) for of_key in streams]
    return dict(zip(keys, arrived, strict=True))


async def measure(arguments: argparse.Namespace) -> list[Measured]:
    measured = []
    with tempfile.TemporaryDirectory(prefix="fairness_benchmark_") as folder:
        made = {name: new_key(name, Role.INFERENCE) for name in NAMES}
        keys = {name: secret for name, (_, secret) in made.items()}
        file = Path(folder) / "keys.json"
        write_keys(file, [key for key, _ in made.values()])
        flags = ["--max-batch-size", str(ROWS), "--max-queued", "1400", "--keys-file", str(file)]
        async with peers.our_server(None, Path(folder), flags) as server:
            await first_tokens(server.port, keys["other"], 3, "warm up")
            for number in range(arguments.repeats):
                measured.append(await _repeat(server.port, keys, arguments, str(number)))
                _tell(measured[-1])
    return measured


async def _repeat(port: int, keys: dict[str, str], arguments: argparse.Namespace, seed: str) -> Measured:
    quiet = await first_tokens(port, keys["other"], arguments.probes, f"quiet {seed}")
    async with flooding(port, [keys["one"]], arguments.flood, f"flood {seed}"):
        beside = await first_tokens(port, keys["other"], arguments.probes, f"beside {seed}")
    tokens = await shares(port, keys, arguments.flood, arguments.seconds, f"shares {seed}")
    return Measured(quiet, beside, tokens)


def judged(measured: Sequence[Measured]) -> list[Figure]:
    """The figures over all repeats. Ratios are of the two sides of one repeat."""
    quiet, beside = ([spread(getattr(each, side)).median for each in measured] for side in ("quiet", "beside"))
    tails = [[percentile(getattr(each, side), 95) for each in measured] for side in ("quiet", "beside")]
    ratio, tail = ratios(beside, quiet), ratios(tails[1], tails[0])
    share = spread(each.share for each in measured)
    off = max(abs(each.share - 0.5) for each in measured)
    return [
        Figure("first token on the quiet server", "s", spread(quiet), spread(quiet).median),
        Figure("first token beside a flood", "s", spread(beside), spread(beside).median),
        Figure("first token beside a flood / quiet", "x", ratio, ratio.median, FIRST_TOKEN_LIMIT),
        Figure("95th percentile beside a flood / quiet", "x", tail, tail.median),
        Figure("share of the first of two keys that flood", "", share, share.median),
        Figure("its largest distance from one half", "", spread([off]), off, SHARE_LIMIT),
    ]


def _tell(measured: Measured) -> None:
    quiet, beside = spread(measured.quiet).median, spread(measured.beside).median
    print(f"  first token {quiet:.3f} s quiet, {beside:.3f} s beside a flood; share {measured.share:.3f}", flush=True)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    machine.warn_if_busy()
    measured = asyncio.run(peers.cancelled_by_sigterm(measure(arguments)))
    figures = judged(measured)
    report.show(figures)
    repeats = [asdict(each) for each in measured]
    setting = {**report.setting(arguments), "rows": ROWS}
    report.write(arguments.out, {"machine": before, "setting": setting, "repeats": repeats}, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flood", type=int, default=500, help="requests that one key sends at once")
    parser.add_argument("--probes", type=int, default=12, help="requests of the other key, on each side")
    parser.add_argument("--seconds", type=float, default=40.0, help="for which shares are measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "fairness.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
