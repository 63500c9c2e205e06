"""Measures how long a request waits: on a busy machine, at a small stall budget, and in a long queue.

    python benchmarks/studies/waiting.py [--repeats 5] [--only burners budget admission] [--model DIR] [--out FILE]

`burners`: two processes use up CPU time; the first token of a short request behind a long row is compared with that of
the same request alone. `budget`: a prompt of 32 tokens while 8 rows decode, with --max-decode-stall-ms 50 and with the
default. `admission`: the scheduler alone; the time of one admission pass while memory is full and thousands of requests
wait, and the time of aborting 4,000. It takes about 3 minutes on two cores. Nothing else should run on the machine
meanwhile.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.burning import burning
from benchmarks.lib.figures import Figure, ratios, reported, spread
from benchmarks.lib.load import Stream
from benchmarks.lib.peers import Peer, our_server
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import body, warm_up
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.scheduler import RLAwareScheduler, SchedulerConfig
from mlx_parallm.engine.sequence import PromptGroup, Sequence

PARTS = ("burners", "budget", "admission")
BURNERS = 2
ROWS, ROW_TOKENS, SETTLED_TOKENS = 8, 4000, 8
SHORT_TOKENS, PROMPT_TOKENS = 4, 32
SHORT_TEXT = "The quick brown fox jumps over the lazy dog. " * 6
TIGHT_BUDGET_MS = 50
RATIO_LIMIT, PASS_LIMIT_MS = 3.0, 1.0
LIVE, WAITING, ABORTED = 64, (1000, 4000), 4000
PASSES = 20
LIMIT_S = 300
TICK_S = 0.02


@dataclass(slots=True)
class Waits:
    """Seconds to the first token, in pairs. `most` is compared with `least`."""

    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def figures(self, name: str, least: str, most: str) -> Iterator[Figure]:
        """The limits apply to the ratio of the medians, and to that of the slowest requests."""
        base, slow = spread(self.least), spread(self.most)
        ratio = ratios(self.most, [base.median] * len(self.most))
        yield Figure(f"first token, {least}", "s", base, base.median)
        yield Figure(f"first token, {most}", "s", slow, slow.median)
        yield Figure(f"{name}, median", "x", ratio, ratio.median, RATIO_LIMIT)
        yield Figure(f"{name}, worst", "x", ratio, ratio.high, RATIO_LIMIT)


@dataclass(slots=True)
class Queue:
    """Milliseconds of admission passes, by the number of waiting sequences, and of aborting all of them."""

    pass_ms: dict[int, list[float]] = field(default_factory=dict)
    abort_ms: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        for waiting, taken in self.pass_ms.items():
            value, judged = reported(taken)
            yield Figure(f"a pass of admission, {waiting:,} waiting", "ms", value, judged, PASS_LIMIT_MS)
        yield Figure(f"aborting {ABORTED:,} that wait", "ms", *reported(self.abort_ms))


# -- a server ------------------------------------------------------------------------------------


async def beside_burners(model: Path | None, logs: Path, repeats: int) -> Waits:
    """Measures the request alone and behind a long row in turns, while the burners run."""
    waits = Waits()
    async with our_server(model, logs) as peer, asyncio.timeout(LIMIT_S):
        await warm_up(peer)
        with peer.awake(), burning(BURNERS):
            for repeat in range(repeats):
                waits.least.append(await _first_token_s(peer, f"{repeat} alone. {SHORT_TEXT}"))
                waits.most.append(await _beside_rows(peer, 1, f"{repeat} behind. {SHORT_TEXT}"))
                _tell(waits)
    return waits


async def at_a_tight_budget(model: Path | None, logs: Path, repeats: int) -> Waits:
    """Measures two servers in turns."""
    waits = Waits()
    tight_flags = ["--max-decode-stall-ms", str(TIGHT_BUDGET_MS)]
    async with (
        our_server(model, logs) as usual,
        our_server(model, logs, tight_flags) as tight,
        asyncio.timeout(LIMIT_S),
    ):
        for peer in (usual, tight):
            await warm_up(peer)
        for repeat in range(repeats):
            for peer, firsts in ((usual, waits.least), (tight, waits.most)):
                with peer.awake():
                    firsts.append(await _beside_rows(peer, ROWS, _prompt(repeat)))
            _tell(waits)
    return waits


async def _beside_rows(peer: Peer, rows: int, prompt: str | list[int]) -> float:
    """Seconds to the first token of a request while `rows` rows decode. The rows are aborted afterwards."""
    streams = [_stream(peer, text, ROW_TOKENS) for text in short_prompts(rows, "rows")]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(stream.run()) for stream in streams]
        while any(len(stream.arrivals) < SETTLED_TOKENS for stream in streams):
            await asyncio.sleep(TICK_S)
        seconds = await _first_token_s(peer, prompt)
        for task in running:
            task.cancel()
    return seconds


async def _first_token_s(peer: Peer, prompt: str | list[int]) -> float:
    stream = _stream(peer, prompt, SHORT_TOKENS)
    await stream.run()
    return stream.first_token_s


def _prompt(repeat: int) -> list[int]:
    """A prompt of 32 token ids that every vocabulary has."""
    return random.Random(repeat).choices(range(100, 250), k=PROMPT_TOKENS)


def _stream(peer: Peer, prompt: str | list[int], tokens: int) -> Stream:
    """A streaming request. `return_token_ids` makes every token an event, even if its text is incomplete."""
    return Stream(peer.port, {**body(prompt, tokens), "ignore_eos": True, "return_token_ids": True})


def _tell(waits: Waits) -> None:
    print(f"  {waits.least[-1]:.2f} s against {waits.most[-1]:.2f} s", flush=True)


# -- the scheduler alone -------------------------------------------------------------------------


class FullMemory:
    """A row memory with room for a fixed number of sequences."""

    def __init__(self, rows: int) -> None:
        self._free = rows

    def ready(self, adapter: AdapterRef) -> bool:
        return True

    def cached(self, sequence: Sequence) -> int:
        return 0

    def open(self, sequence: Sequence) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def share(self, sequence: Sequence) -> None:
        return None

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def close(self, sequence: Sequence) -> None:
        self._free += 1
        sequence.computed = 0


def in_the_queue(repeats: int) -> Queue:
    """Times admission passes after the first one, which sorts the new sequences."""
    queue = Queue()
    for waiting in WAITING:
        scheduler, _ = _crowded(waiting)
        scheduler.admit()
        queue.pass_ms[waiting] = [_milliseconds(scheduler.admit) for _ in range(PASSES)]
    for _ in range(repeats):
        scheduler, rows = _crowded(ABORTED)
        scheduler.admit()
        queue.abort_ms.append(_milliseconds(partial(_abort, scheduler, rows)))
    return queue


def _crowded(waiting: int) -> tuple[RLAwareScheduler, list[Sequence]]:
    """A scheduler with full memory, and the sequences that wait."""
    scheduler = RLAwareScheduler(SchedulerConfig(), FullMemory(LIVE), CostModel(0.05, 0.002, 1e-6))
    rows = [
        Sequence(tokens=[0] * 60, max_tokens=100, arrived_at=float(number), group=PromptGroup())
        for number in range(LIVE + waiting)
    ]
    for row in rows:
        scheduler.add(row)
    scheduler.admit()
    return scheduler, rows[LIVE:]


def _abort(scheduler: RLAwareScheduler, rows: list[Sequence]) -> None:
    for row in rows:
        scheduler.finish(row)


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


# -- one run -------------------------------------------------------------------------------------


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills all child processes, as Ctrl-C does
    before = machine.describe()
    machine.warn_if_busy()
    record: dict[str, object] = {}
    judged: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="waiting_benchmark_") as folder:
        for name in arguments.only:
            print(name, flush=True)
            figures, record[name] = _measure(name, arguments, Path(folder))
            judged += figures
    report.show(judged)
    setting = {"repeats": arguments.repeats, "only": arguments.only, "model": str(arguments.model or "bundled")}
    report.write(arguments.out, {"machine": before, "setting": setting, **record}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _measure(name: str, arguments: argparse.Namespace, logs: Path) -> tuple[list[Figure], dict[str, object]]:
    if name == "admission":
        queue = in_the_queue(arguments.repeats)
        return list(queue.figures()), asdict(queue)
    if name == "burners":
        waits = asyncio.run(beside_burners(arguments.model, logs, arguments.repeats))
        labels = ("behind a long row beside 2 burners", "alone beside the burners", "behind a row beside the burners")
    else:
        waits = asyncio.run(at_a_tight_budget(arguments.model, logs, arguments.repeats))
        labels = (f"beside 8 rows at {TIGHT_BUDGET_MS} ms", "beside 8 rows, default budget", "the same at 50 ms")
    return list(waits.figures(*labels)), asdict(waits)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", type=Path, help="a model directory; the bundled model without it")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "waiting.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
