"""Runs a server for half an hour under good and hostile clients, and looks for what grows, is lost or is wrong.

    python benchmarks/soak.py [--minutes 30] [--control-minutes 10] [--quick] [--out FILE]

A tiny random model serves and learns. Good clients use every API, with answers of all lengths, adapters and schemas;
their answers are compared with those of a quiet server. Meanwhile adapters are published, updates are made from every
source, and adapters and a second base model are loaded again. Hostile clients send bad input, garbage and half
requests, leave, and do not read. The server is ended by SIGTERM and started again after a fifteenth of the time, and
before the last one; what grows is measured in the process between, when all clients pause. A second server then gets
the same load without the hostile clients. With --quick, both take one minute, and nothing is judged that needs more.
"""

import argparse
import asyncio
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, pstdev
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, Spread, errors, percentile, ratios, reported, spread
from benchmarks.lib.peers import cancelled_by_sigterm
from benchmarks.lib.soak.good import Known, Told, controls
from benchmarks.lib.soak.hostile import Done
from benchmarks.lib.soak.loads import Loads, loads
from benchmarks.lib.soak.plot import plot
from benchmarks.lib.soak.serving import Point, Server, prepare

POINT_S = 5.0
SHARE_OF_A_RESTART = 1 / 15
UPDATES_BEFORE, QUICK_UPDATES = 900, 25
"""Updates that are in the journal before the load. With those of the warm-up, they are the 1,100 that it keeps."""
WARM_UP = 0.3
"""Part of the measured process's time after which it must not grow."""
MINUTE_S = 60.0
PAUSE_EVERY_S, IDLE_S, COUNTING_S = 120.0, 12.0, 1.0
"""Every so often, clients begin nothing for so long that what they have begun has ended, and what is idle is unloaded.
"""
QUIET_CORES = 0.25
"""Cores that other programs may take in a minute whose latencies count."""
GROWING = {
    "resident": "RSS",
    "threads": "threads",
    "descriptors": "descriptors",
    "arrays": "live arrays",
    "journal": "journal",
}
"""What must not grow, by field of a point."""
REPORTED = {"active": "bytes of MLX's arrays, with cached prefixes", "objects": "Python's objects"}
"""What may grow a little while caches fill."""
GROWTH_PERCENT, SLOWER, BAD_PERCENT, PUBLISHES, UPDATES, MOST_RESTARTS = 1.0, 1.5, 20.0, 100, 20, 2


@dataclass(slots=True)
class Run:
    """One server under load. `idle`: points in pauses, and `counts`: what the server counted there. `down`: the times
    without a server. `ends`: exit code and seconds of each end. `left_behind`: what was held when nothing was under
    way."""

    minutes: float
    points: list[Point] = field(default_factory=list)
    idle: list[Point] = field(default_factory=list)
    counts: list[dict[str, Any]] = field(default_factory=list)
    down: list[tuple[float, float]] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)
    left_behind: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    good: Told = field(default_factory=Told)
    hostile: Done = field(default_factory=Done)
    logged_errors: list[str] = field(default_factory=list)

    @property
    def measured(self) -> list[Point]:
        """The points of the process that ran for longest, without its warm-up."""
        process = max((point.process for point in self.points), key=self._seconds)
        mine = [point for point in self.points if point.process == process]
        return [point for point in mine if point.at >= mine[0].at + WARM_UP * (mine[-1].at - mine[0].at)]

    @property
    def measured_idle(self) -> list[Point]:
        """The points in pauses of that time."""
        return [point for point in self.idle if self._is_measured(point)]

    def changed(self, kind: str) -> dict[str, list[int]]:
        """How many of each of the `types` or `threads` there were in the pauses of that time, where it differed."""
        pauses = zip(self.idle, self.counts, strict=True)
        counted = [counts[kind] for point, counts in pauses if self._is_measured(point)]
        names = sorted({name for one in counted for name in one})
        return {name: many for name in names if len(set(many := [one.get(name, 0) for one in counted])) > 1}

    def _is_measured(self, point: Point) -> bool:
        return self.measured[0].at <= point.at <= self.measured[-1].at

    def _seconds(self, process: int) -> float:
        times = [point.at for point in self.points if point.process == process]
        return times[-1] - times[0]

    def latencies(self) -> list[list[float]]:
        """Seconds of the good requests of each whole minute of the measured time in which little else ran on the
        machine."""
        begin, end = self.measured[0].at, self.measured[-1].at
        minutes: list[list[float]] = [[] for _ in range(max(1, int((end - begin) // MINUTE_S)))]
        others: list[list[float]] = [[] for _ in minutes]
        for name, at, seconds in self.good.done:
            if 0 <= (minute := int((at - begin) // MINUTE_S)) < len(minutes) and not name.startswith("change"):
                minutes[minute].append(seconds)
        for point in self.measured:
            if (minute := int((point.at - begin) // MINUTE_S)) < len(minutes):
                others[minute].append(point.others)
        return [taken for taken, cores in zip(minutes, others, strict=True) if cores and fmean(cores) <= QUIET_CORES]

    def faults(self) -> Iterator[str]:
        yield from self.good.faults
        yield from self.hostile.faults
        yield from self.logged_errors
        for sent, ended, request in (*self.good.refused, *self.hostile.refused):
            if not any(sent <= end and ended >= begin for begin, end in self.down):
                yield f"refused: {request}"

    def growth(self, name: str) -> Spread:
        """Percent in 10 minutes, by the line with the least squares through the pauses of the measured process, and two
        standard errors around it. What requests hold comes and goes, so only pauses say what stays; and there, how many
        versions of adapters are ready still differs."""
        points = self.measured_idle
        if len(points) < 3:
            return Spread(math.nan, math.nan, math.nan)
        times, values = [point.at for point in points], [float(getattr(point, name)) for point in points]
        slope, at_0 = linear_regression(times, values)
        apart = sum((value - slope * at - at_0) ** 2 for at, value in zip(times, values, strict=True))
        error = math.sqrt(apart / (len(points) - 2)) / (pstdev(times) * math.sqrt(len(points)))
        percent = 60_000 / fmean(values)
        return Spread(*(percent * each for each in (slope, slope - 2 * error, slope + 2 * error)))


# -- a run -----------------------------------------------------------------------------------------


async def soak(server: Server, known: list[Known], parts: tuple[float, ...], hostile: bool) -> Run:
    """Puts a running server under load. `parts`: the minutes of each of its processes."""
    run = Run(sum(parts))
    before = (await server.get("/v1/training/status"))["step"]
    with loads(server.port, server.keys, known, hostile) as made:
        for number, part in enumerate(parts):
            if number:
                await _restart(server, made, run)
            await _watch(server, made, run, 60 * part)
    run.good, run.hostile = made.good, made.hostile
    run.left_behind |= await server.left_behind()
    run.updates = (await server.get("/v1/training/status"))["step"] - before
    run.ends.append(await server.end())
    run.logged_errors = [line for line in server.log.read_text().splitlines() if _is_error(line)]
    return run


async def _restart(server: Server, made: Loads, run: Run) -> None:
    began = time.monotonic()
    run.ends.append(await server.end())
    made.process.value += 1
    await server.start()
    run.down.append((began, time.monotonic()))


async def _watch(server: Server, made: Loads, run: Run, seconds: float) -> None:
    began = paused = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(POINT_S, left))
        run.points.append(await server.point())
        _show(run.points[-1], began, "")
        if time.monotonic() > paused + PAUSE_EVERY_S:
            run.idle.append(await _idle(server, made, run))
            _show(run.idle[-1], began, ", idle")
            paused = time.monotonic()


async def _idle(server: Server, made: Loads, run: Run) -> Point:
    """What is seen in a pause."""
    made.paused.set()
    await asyncio.sleep(IDLE_S)
    run.left_behind |= await server.left_behind()
    await server.come_to_rest()
    await server.point(signal.SIGUSR2)
    await asyncio.sleep(COUNTING_S)
    point = await server.point()
    run.counts.append(server.counts())
    made.paused.clear()
    return point


def _show(point: Point, began: float, what: str) -> None:
    print(
        f"  {point.at - began:5.0f} s of process {point.process}{what}: RSS {point.resident / 1e6:.1f} MB, "
        f"{point.threads} threads, {point.descriptors} descriptors, {point.arrays} arrays, {point.objects} objects, "
        f"{point.active / 1e6:.1f} MB of arrays, journal {point.journal / 1e6:.2f} MB, others {point.others:.2f} cores",
        flush=True,
    )


def _is_error(line: str) -> bool:
    return '"level":"error"' in line or "Traceback" in line or " error " in line


async def measure(arguments: argparse.Namespace, folder: Path) -> tuple[Run, Run]:
    """The run with hostile clients, and the one without."""
    minutes = 1.0 if arguments.quick else arguments.minutes
    short = minutes * SHARE_OF_A_RESTART
    keys, runs = prepare(folder), []
    for name, hostile, parts in (
        ("soak", True, (short, minutes - 2 * short, short)),
        ("control", False, (1.0 if arguments.quick else arguments.control_minutes,)),
    ):
        server = Server(folder, folder / name, keys)
        try:
            await server.start()
            if hostile:
                known, _ = await asyncio.gather(
                    controls(server.port, keys["good"]),
                    server.fill_journal(QUICK_UPDATES if arguments.quick else UPDATES_BEFORE),
                )
                print(f"{len(known)} questions with a control", flush=True)
            else:
                await server.fill_journal(1)  # from now on the adapter in training is served
            print(name, flush=True)
            runs.append(await soak(server, known, parts, hostile))
        finally:
            server.kill()
    return runs[0], runs[1]


# -- figures ---------------------------------------------------------------------------------------


def figures(run: Run, control: Run, judged: bool) -> Iterator[Figure]:
    """`judged`: whether the run was long enough for the limits that depend on it."""
    bad, good = run.hostile.counts["bad requests"], sum(run.good.counts[name] for name in _answered(run.good))
    yield Figure("minutes under load", "", *reported([run.minutes]))
    yield Figure("good requests", "", *reported([good]))
    for name in _answered(run.good):
        yield Figure(f"good requests: {name}", "", *reported([run.good.counts[name]]))
    yield Figure("bad requests, of all", "%", *reported([100 * bad / max(1, bad + good)]), BAD_PERCENT, at_least=True)
    for name, count in sorted(run.hostile.counts.items()):
        yield Figure(f"hostile: {name}", "", *reported([count]))
    yield Figure(
        "publishes", "", *reported([run.good.counts["publishes"]]), PUBLISHES if judged else None, at_least=True
    )
    yield Figure("updates", "", *reported([run.updates]), UPDATES if judged else None, at_least=True)
    for name in ("reloads", "Tinker sessions", "tried again"):
        yield Figure(name, "", *reported([run.good.counts[name]]))
    yield Figure("restarts by SIGTERM", "", *reported([len(run.down)]), MOST_RESTARTS)
    yield errors("processes that did not end with 0", sum(code != 0 for code, _ in run.ends + control.ends))
    faults = [*run.faults(), *control.faults()]
    for kind in ("ended other than once", "another answer", "another version", "no answer", "refused"):
        yield errors(f"faults: {kind}", sum(fault.startswith(kind) for fault in faults))
    yield errors("faults in all", len(faults))
    yield errors("held by no request in pauses and at the end", len(run.left_behind) + len(control.left_behind))
    if judged:
        yield Figure("pauses in which growth is measured", "", *reported([len(run.measured_idle)]))
        for name, title in (GROWING | REPORTED).items():
            limit = GROWTH_PERCENT if name in GROWING else None
            growth = run.growth(name)
            yield Figure(f"growth in 10 minutes: {title}", "%", growth, growth.median, limit)
    yield from _latencies(run, control, judged)


def _answered(told: Told) -> list[str]:
    return sorted(name for name in told.counts if name.startswith("/"))


def _latencies(run: Run, control: Run, judged: bool) -> Iterator[Figure]:
    hostile, quiet = ([percentile(minute, 99) for minute in each.latencies()] for each in (run, control))
    ours, theirs = (percentile([s for minute in each.latencies() for s in minute], 99) for each in (run, control))
    yield Figure("minutes whose latencies count", "", *reported([len(hostile)]))
    yield Figure("minutes whose latencies count, without hostile clients", "", *reported([len(quiet)]))
    yield Figure("p99 of good requests, by minute", "s", *reported(hostile))
    yield Figure("p99 of good requests, by minute, without hostile clients", "s", *reported(quiet))
    by_minute = ratios(hostile, [spread(quiet).median] * len(hostile))
    ratio = Spread(ours / theirs, by_minute.low, by_minute.high)
    yield Figure("p99 beside hostile clients", "x", ratio, ratio.median, SLOWER if judged else None)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    machine.warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="soak_benchmark_") as folder:
        run, control = asyncio.run(cancelled_by_sigterm(measure(arguments, Path(folder))))
    judged = list(figures(run, control, not arguments.quick))
    report.show(judged)
    for fault in [*run.faults(), *control.faults()][:20]:
        print(fault)
    record = {name: _recorded(each) for name, each in (("soak", run), ("control", control))}
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **record}, judged)
    plot(run, control, arguments.out.with_suffix(".png"))
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _recorded(run: Run) -> dict[str, Any]:
    """A run without the single requests."""
    minutes = [[len(minute), percentile(minute, 50), percentile(minute, 99)] for minute in run.latencies()]
    return {
        "points": [list(asdict(point).values()) for point in run.points],
        "idle": [list(asdict(point).values()) for point in run.idle],
        "changed": {kind: run.changed(kind) for kind in ("types", "threads")},
        "minutes": minutes,
        "ends": run.ends,
        "left_behind": run.left_behind,
        "faults": list(run.faults())[:20],
        "statuses": dict(run.hostile.statuses),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="under good and hostile clients")
    parser.add_argument("--control-minutes", type=float, default=10.0, help="under good clients only")
    parser.add_argument("--quick", action="store_true", help="one minute each")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "soak.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
