"""Measures a server that a thousand connections reach at once, and one that hundreds of idle and slow clients hold.

    python benchmarks/studies/crowds.py [--requests 400] [--repeats 5] [--out FILE]

The burst: 1,000 connections send a request to a server with 16 rows and a queue of 64, while another client asks for
`/health` twenty times a second. Each must get an answer, and none may hang. The crowd: 500 connections that send
nothing, and 50 clients that read one byte of their answer in a second, stay while 8 clients send requests without a
pause. Their rate is measured with the crowd and without it, in turns, once the answers that nobody reads are computed.
The model is a small random one, so that connections cost more than tokens. It takes about 5 minutes on two cores.
Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.durability.processes import small_model
from benchmarks.lib.figures import Figure, errors, percentile, ratios, reported, spread
from benchmarks.lib.load import HOST, closed_loop, greedy
from benchmarks.lib.peers import our_server
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.soak.asking import COMPLETIONS, LIMIT_S, ask, head

CONNECTIONS, QUEUE, ROWS = 1000, 64, 16
HEALTH_S, HEALTH_LIMIT_S = 0.05, 0.2
IDLE, SLOW, CLIENTS, LOST_PERCENT = 500, 50, 8, 10.0
TOKENS, SLOW_TOKENS, SETTLE_S = 16, 200, 15.0
WARM_UP_REQUESTS = 80
READY_LIMIT_S = 60


@dataclass(slots=True)
class Burst:
    """`statuses`: the answers of the connections, 0 for none. `health`: seconds of each probe that was answered 200."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    sick: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """`alone`, `beside`: tokens a second of the 8 clients, without the crowd and with it."""

    bursts: list[Burst] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


# -- other processes -------------------------------------------------------------------------------


@contextmanager
def elsewhere(target: Callable[..., Any], port: int) -> Iterator[Any]:
    """Runs `target(port, ready, stop, results)` in another process. Yields the end of the pipe of its results."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    results, sending = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(port, ready, stop, sending), daemon=True)
    process.start()
    try:
        if not ready.wait(READY_LIMIT_S):
            raise TimeoutError("the process of the crowd did not start")
        yield results
        stop.set()
        process.join(READY_LIMIT_S)
    finally:
        process.kill()


def _many_files() -> None:
    """Lets this process open as many connections as it needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CONNECTIONS), hard))


def burst(port: int, ready: Any, stop: Any, results: Any) -> None:
    """Sends all requests at once. Reports status and seconds of each."""
    _many_files()
    body = {"prompt": "The sea", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    async def all_at_once() -> list[tuple[int, float]]:
        replies = await asyncio.gather(*(ask(port, COMPLETIONS, body) for _ in range(CONNECTIONS)))
        return [(0 if reply.error else reply.status, reply.seconds) for reply in replies]

    ready.set()
    results.send(asyncio.run(all_at_once()))
    stop.wait()


def crowd(port: int, ready: Any, stop: Any, results: Any) -> None:
    """Holds the idle connections, and reads the others slowly."""
    _many_files()
    body = {"prompt": "The sea", "max_tokens": SLOW_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    sent = json.dumps(body).encode()

    async def hold() -> None:
        idle = [await asyncio.open_connection(HOST, port) for _ in range(IDLE)]
        slow = [await asyncio.open_connection(HOST, port, limit=1) for _ in range(SLOW)]
        for _, writer in slow:
            writer.write(head("POST", COMPLETIONS, len(sent), "") + sent)
        ready.set()
        while not stop.is_set():
            await asyncio.gather(asyncio.sleep(1.0), *(reader.read(1) for reader, _ in slow))
        for _, writer in (*idle, *slow):
            writer.transport.abort()

    asyncio.run(hold())


# -- measuring -------------------------------------------------------------------------------------


async def one_burst(port: int) -> Burst:
    made = Burst()
    with elsewhere(burst, port) as results:
        while not await asyncio.to_thread(results.poll, 0):
            reply = await ask(port, "/health")
            if reply.status == 200:
                made.health.append(reply.seconds)
            else:
                made.sick.append(f"{reply.status} {reply.error} {reply.body[:100]!r}")
            await asyncio.sleep(max(0.0, HEALTH_S - reply.seconds))
        answers = results.recv()
    made.statuses = dict(Counter(status for status, _ in answers))
    made.seconds = [round(seconds, 3) for _, seconds in answers]
    return made


async def rate(port: int, requests: int, failed: list[str]) -> float:
    """Tokens a second of the clients, who send so many requests together."""
    bodies = [{"prompt": prompt, **greedy(TOKENS)} for prompt in short_prompts(requests, "crowds")]
    load = await closed_loop(port, bodies, CLIENTS)
    failed += load.errors
    return load.rate


async def measure(requests: int, repeats: int, folder: Path) -> Measured:
    made, model = Measured(), small_model(folder / "model")
    async with our_server(model, folder, ("--max-batch-size", str(ROWS), "--max-queued", str(QUEUE))) as server:
        await rate(server.port, WARM_UP_REQUESTS, made.failed)  # the first requests of a server are slower
        for _ in range(repeats):
            made.bursts.append(await one_burst(server.port))
            print(f"  {made.bursts[-1].statuses}, /health at most {max(made.bursts[-1].health):.3f} s", flush=True)
    async with our_server(model, folder) as server:
        await rate(server.port, WARM_UP_REQUESTS, made.failed)
        for _ in range(repeats):
            made.alone.append(await rate(server.port, requests, made.failed))
            with elsewhere(crowd, server.port):
                await asyncio.sleep(SETTLE_S)
                made.beside.append(await rate(server.port, requests, made.failed))
            print(f"  {made.alone[-1]:.0f} tokens/s alone, {made.beside[-1]:.0f} beside the crowd", flush=True)
    return made


def figures(made: Measured) -> Iterator[Figure]:
    for status in sorted({status for each in made.bursts for status in each.statuses}):
        answered = [each.statuses.get(status, 0) for each in made.bursts]
        yield Figure(f"burst: answers with status {status}", "", *reported(list(map(float, answered))))
    yield errors("burst: connections without an answer", sum(each.statuses.get(0, 0) for each in made.bursts))
    yield Figure("burst: the last answer", "s", *reported([max(each.seconds) for each in made.bursts]), LIMIT_S)
    health = [max(each.health) for each in made.bursts]
    yield Figure("burst: 99th percentile of /health", "s", *reported([percentile(b.health, 99) for b in made.bursts]))
    yield Figure("burst: slowest /health", "s", spread(health), max(health), HEALTH_LIMIT_S)
    yield errors("burst: /health not 200", sum(len(each.sick) for each in made.bursts))
    yield Figure("crowd: 8 clients alone", "tok/s", *reported(made.alone))
    yield Figure("crowd: 8 clients beside it", "tok/s", *reported(made.beside))
    kept = ratios(made.beside, made.alone)
    yield Figure("crowd: kept of the rate", "%", spread(_percents(made)), 100 * kept.median, 100 - LOST_PERCENT, True)
    yield errors("crowd: failed requests", len(made.failed))


def _percents(made: Measured) -> Sequence[float]:
    return [100 * beside / alone for beside, alone in zip(made.beside, made.alone, strict=True)]


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    machine.warn_if_busy()
    _many_files()
    with tempfile.TemporaryDirectory(prefix="crowds_benchmark_") as folder:
        made = asyncio.run(measure(arguments.requests, arguments.repeats, Path(folder)))
    judged = list(figures(made))
    report.show(judged)
    report.write(
        arguments.out, {"machine": before, "setting": report.setting(arguments), "measured": asdict(made)}, judged
    )
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="of the 8 clients, each time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "crowds.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
