"""Measures how long other clients wait while one client attacks the server.

    python benchmarks/studies/isolation.py [--seconds 8] [--only WORD] [--out FILE]

The server is a real one with the bundled model. For each attack, `/health` and a request for one token are timed on the
quiet server, then while another process repeats the attack, then on the quiet server again. The limit applies to the
95th percentile during the attack. It takes about 3 minutes on two cores. Nothing else should run on the machine
meanwhile.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, Spread, percentile, spread
from benchmarks.lib.load import HOST
from benchmarks.lib.serving.attacks import Attack, attacks, sending

HEALTH_LIMIT_S = 0.1
PAUSE_S = 0.05
FEWEST = 20
"""Least number of probes of each kind; fewer have no 95th percentile."""
LIMIT_S = 120
ONE_TOKEN = json.dumps({"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}).encode()


@dataclass(slots=True)
class Probes:
    """Seconds that each probe took, by kind."""

    health: list[float] = field(default_factory=list)
    one_token: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """The measurements of one attack. `answers` counts the attacker's responses by status."""

    name: str
    limit: float
    quiet: Probes
    beside: Probes
    answers: dict[str, int]

    def judged(self) -> Iterator[Figure]:
        health, quiet, beside = (
            _p95(taken) for taken in (self.beside.health, self.quiet.one_token, self.beside.one_token)
        )
        yield Figure(f"/health beside: {self.name}", "s", health, health.median, HEALTH_LIMIT_S)
        calm = _p95(self.quiet.health)
        yield Figure(f"/health on the quiet server, before and after: {self.name}", "s", calm, calm.median)
        ratio = beside.median / quiet.median
        yield Figure(f"one token beside: {self.name}", "x", Spread(ratio, ratio, ratio), ratio, self.limit)
        failed = len(self.quiet.errors) + len(self.beside.errors)
        yield Figure(f"failed probes beside: {self.name}", "", spread([failed]), failed, 0)


def _p95(values: Sequence[float]) -> Spread:
    """The 95th percentile as the value, with the median and the longest as its spread."""
    ordered = spread(values)
    return Spread(percentile(values, 95), ordered.median, ordered.high)


async def probe(port: int, seconds: float) -> Probes:
    """Sends both kinds of probe for so many seconds, one of each kind at a time."""
    taken, until = Probes(), time.perf_counter() + seconds
    await asyncio.gather(
        _repeat(port, b"GET /health", b"", until, taken.health, taken.errors),
        _repeat(port, b"POST /v1/completions", ONE_TOKEN, until, taken.one_token, taken.errors),
    )
    return taken


async def _repeat(port: int, route: bytes, body: bytes, until: float, taken: list[float], errors: list[str]) -> None:
    while time.perf_counter() < until or len(taken) + len(errors) < FEWEST:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S):
                await _ask(port, route, body)
        except OSError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            taken.append(time.perf_counter() - started)
        await asyncio.sleep(PAUSE_S)


async def _ask(port: int, route: bytes, body: bytes) -> None:
    """Sends one request. Raises OSError unless the response has status 200."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        length = str(len(body)).encode()
        head = b" HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        writer.write(route + head + length + b"\r\n\r\n" + body)
        answer = await reader.read()
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise OSError(answer[:200].decode(errors="replace"))
    finally:
        writer.close()


async def measure(only: str, seconds: float) -> list[Measured]:
    measured = []
    with tempfile.TemporaryDirectory(prefix="isolation_benchmark_") as logs:
        async with peers.our_server(None, Path(logs)) as server:
            await probe(server.port, 2)  # the first requests of a server are slower
            for attack in attacks():
                if only in attack.name:
                    measured.append(await _beside(attack, server.port, seconds))
                    _tell(measured[-1])
    return measured


async def _beside(attack: Attack, port: int, seconds: float) -> Measured:
    quiet = await probe(port, seconds / 2)
    with sending(attack, port) as answers:
        await asyncio.sleep(0.5)
        beside = await probe(port, seconds)
    after = await probe(port, seconds / 2)
    quiet.health += after.health
    quiet.one_token += after.one_token
    quiet.errors += after.errors
    return Measured(attack.name, attack.limit, quiet, beside, dict(answers))


def _tell(measured: Measured) -> None:
    shown = [f"{figure.name.partition(':')[0]} {figure.value.median:.3f} {figure.unit}" for figure in measured.judged()]
    print(f"  {measured.name}: {', '.join(shown)}; the attacker got {measured.answers}", flush=True)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    machine.warn_if_busy()
    measured = asyncio.run(measure(arguments.only, arguments.seconds))
    judged = [figure for attack in measured for figure in attack.judged()]
    report.show(judged)
    setting = {"seconds": arguments.seconds, "only": arguments.only}
    attacked = [asdict(attack) for attack in measured]
    report.write(arguments.out, {"machine": before, "setting": setting, "attacks": attacked}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of probes beside each attack")
    parser.add_argument("--only", default="", metavar="WORD", help="attacks whose name has this in it")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "isolation.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
