"""How much an open dashboard slows serving down.

    python benchmarks/studies/dashboard.py [--repeats 10] [--view now] [--chromium chromium] [--out FILE]

Eight clients stream completions from a server with training; in turn without the page, and with its view --view open in
a real browser, which asks for its figures and follows the events as it does for a person. Server and browser each have
one core, so that what the browser computes is not counted. The two measurements of a repeat come one after the other,
in turn the one and the other first. About 10 minutes. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, ratios, reported
from benchmarks.lib.load import HOST, closed_loop
from benchmarks.lib.peers import Peer, cancelled_by_sigterm, our_server
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import body, warm_up

CLIENTS, REQUESTS, TOKENS = 8, 16, 64
SERVER_CORE, BROWSER_CORE = 0, 1
SETTLE_S = 5.0
"""The page is loaded and drawn after this time."""

LEAST_SHARE = 0.98


@dataclass(slots=True)
class Rates:
    """Tokens per second, one value per repeat."""

    closed: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)


def main() -> int:
    """Returns the exit code: 0 if the figure keeps to its limit, 1 if it does not."""
    arguments = _arguments()
    machine.warn_if_busy()
    before = machine.describe()
    rates = asyncio.run(cancelled_by_sigterm(_measure(arguments)))
    share = ratios(rates.opened, rates.closed)
    figures = [
        Figure("tokens per second, page closed", "tok/s", *reported(rates.closed)),
        Figure("tokens per second, page open", "tok/s", *reported(rates.opened)),
        Figure("open / closed", "x", share, share.median, LEAST_SHARE, at_least=True),
    ]
    report.show(figures)
    report.write(
        arguments.out, {"machine": before, "setting": report.setting(arguments), "rates": asdict(rates)}, figures
    )
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


async def _measure(arguments: argparse.Namespace) -> Rates:
    rates = Rates()
    with tempfile.TemporaryDirectory(prefix="dashboard_benchmark_") as name:
        folder = Path(name)
        _stay_on(SERVER_CORE)  # the server inherits it
        flags = ("--enable-rl-training", "--checkpoint-dir", str(folder / "run"), "--no-prefix-cache")
        async with our_server(None, folder, flags) as server:
            _stay_on(BROWSER_CORE)
            await warm_up(server)
            with server.awake():
                for repeat in range(arguments.repeats):
                    for opened in (False, True) if repeat % 2 == 0 else (True, False):
                        if opened:
                            async with _page(arguments, server, folder):
                                rates.opened.append(await _rate(server, repeat))
                        else:
                            rates.closed.append(await _rate(server, repeat))
    return rates


def _stay_on(core: int) -> None:
    """This process and those that it starts use one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


async def _rate(server: Peer, repeat: int) -> float:
    """Tokens per second of all clients together. Raises RuntimeError if a request fails."""
    bodies = [{**body(prompt, TOKENS), "ignore_eos": True} for prompt in short_prompts(REQUESTS, f"page {repeat}")]
    load = await closed_loop(server.port, bodies, CLIENTS)
    if load.errors:
        raise RuntimeError(load.errors[0])
    return load.rate


@asynccontextmanager
async def _page(arguments: argparse.Namespace, server: Peer, folder: Path) -> AsyncIterator[None]:
    """The dashboard in a browser. Raises RuntimeError if the browser ends by itself."""
    process = await asyncio.create_subprocess_exec(
        arguments.chromium,
        *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        f"--user-data-dir={folder / 'browser'}",
        f"http://{HOST}:{server.port}/dashboard#/{arguments.view}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        if process.returncode is not None:
            raise RuntimeError(f"{arguments.chromium} has ended with exit code {process.returncode}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--view", default="now", choices=("now", "learning", "adapters"))
    parser.add_argument("--chromium", default="chromium", help="the browser's program")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "dashboard.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
