"""Makes faults in a cluster under traffic, and measures what its clients see of each and when it is whole again.

    python benchmarks/studies/cluster_faults.py [--times 20] [--only FAULT ...] [--minutes 4] [--seed 0] [--list]

A head with its NATS server, two replicas and a trainer, all with a tiny random model on this machine. Seven clients ask
all the time: whole answers and streams of the base model and of the adapter, answers to be trained on with rewards, and
one client of a replica. Processes are killed and stopped; links between two of them are cut, so that connections are
refused or packets vanish; the head's disk is filled (as root, on Linux); nodes have another version of the package or a
wrong clock. Each fault is made `--times` times, at a random moment, one after another in one life of the cluster.

Each case is written to the record when it has ended, and those that it has are not made again: a run with `--minutes`
ends early, and the next one goes on. `--fresh` forgets the record. Prints a table and writes JSON. Twenty times take
two hours on two cores.
"""

import argparse
import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.cluster.crew import READY_S, Crew, crew, until
from benchmarks.lib.cluster.faults import Fault, all_faults, as_record, suffer
from benchmarks.lib.cluster.nodes import small_model
from benchmarks.lib.cluster.traffic import Traffic
from benchmarks.lib.figures import Figure, errors, percentile, reported
from benchmarks.lib.peers import cancelled_by_sigterm

RECORD = report.RESULTS / "cluster_faults.json"
DISK_MB = 192
LEARNT_S = 120.0
"""How long the trainer may take to get all that was acknowledged: NATS sends again after 60 s."""
MOST_DESCRIPTORS = 10


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    faults = [fault for fault in all_faults() if not arguments.only or fault.name in arguments.only]
    if arguments.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    record = _begun(arguments)
    done = Counter(case["fault"] for case in record["cases"])
    left = [(fault, time) for time in range(arguments.times) for fault in faults if time >= done[fault.name]]
    if left:
        with tempfile.TemporaryDirectory(prefix="cluster_faults_") as created, _small_disk(Path(created)) as disk:
            asyncio.run(cancelled_by_sigterm(_measured(arguments, left, record, Path(created), disk)))
    figures = list(_figures(record["cases"]))
    report.show(figures, _table(record["cases"]))
    _write(arguments.out, record)
    return int(any(figure.met is False for figure in figures))


async def _measured(
    arguments: argparse.Namespace,
    left: list[tuple[Fault, int]],
    record: dict[str, Any],
    folder: Path,
    disk: Path | None,
) -> None:
    model = await asyncio.to_thread(small_model, folder / "model")
    ends = time.monotonic() + 60 * arguments.minutes
    dice = random.Random(f"{arguments.seed} {len(record['cases'])}")
    async with crew(model, folder, disk or folder) as running:
        traffic = Traffic(running, arguments.seed)
        async with traffic.running():
            await until(partial(_has_learnt, running), READY_S)
            for fault, number in left:
                if "disk" in fault.name and disk is None:
                    continue
                if time.monotonic() > ends:
                    break
                seen = await suffer(running, traffic, fault, number, dice)
                record["cases"].append(as_record(seen))
                _write(arguments.out, record)
                print(f"{fault.name} {number}: recovered {seen.recovered}, {seen.failed} {seen.problem}", flush=True)
                if seen.problem or seen.broken:
                    _show_logs(folder)
                if seen.problem:
                    break
        record["cases"][-1] |= await _accounted(running, traffic)


async def _has_learnt(running: Crew) -> bool:
    return bool(await running.live())


async def _accounted(running: Crew, traffic: Traffic) -> dict[str, int]:
    """How many acknowledged answers the trainer does not get, how many are in two updates, and `Traffic.pairs`."""
    try:
        await until(partial(_arrived, running, traffic), LEARNT_S)
    except TimeoutError:
        print("not all that was acknowledged has come to the trainer", file=sys.stderr)
    waiting, trained = _journal(running)
    twice = sum(times > 1 for times in trained.values())
    pairs, alike = traffic.pairs()
    return {"lost": len(set(traffic.acknowledged) - waiting), "twice": twice, "pairs": pairs, "alike": alike}


async def _arrived(running: Crew, traffic: Traffic) -> bool:
    return set(traffic.acknowledged) <= _journal(running)[0]


def _journal(running: Crew) -> tuple[set[str], Counter[str]]:
    """The trajectories that the trainer has, and how many updates each is in."""
    journal = sqlite3.connect(f"file:{running.journal}?mode=ro", uri=True, timeout=10)
    try:
        waiting = {
            one for (one,) in journal.execute("SELECT trajectory_id FROM intake WHERE kind = 'trajectory'").fetchall()
        }
        updates = journal.execute("SELECT body FROM changes WHERE kind = 'update'").fetchall()
    finally:
        journal.close()
    trained = Counter(
        one
        for (body,) in updates
        for group in json.loads(body)["groups"]
        for episode in group["episodes"]
        for one in episode["trajectory_ids"]
    )
    return waiting, trained


# -- the record ----------------------------------------------------------------------------------


def _figures(cases: list[dict[str, Any]]) -> Iterator[Figure]:
    yield errors("requests that hung", sum(case["hung"] for case in cases))
    yield errors("requests that a fault failed and must not", sum(case["broken"] for case in cases))
    yield errors("answers that were not of the version that they name", sum(case["wrong"] for case in cases))
    if pairs := sum(case["pairs"] for case in cases):
        alike = 100 * sum(case["alike"] for case in cases) / pairs
        yield Figure("versions in succession that this cannot tell apart", "%", *reported([alike]))
    yield errors("acknowledged answers that the trainer did not get", sum(case["lost"] for case in cases))
    yield errors("answers in two updates", sum(case["twice"] for case in cases))
    yield errors("faults after which the cluster was not whole again", sum(bool(case["problem"]) for case in cases))
    yield errors("processes with more descriptors than at their first fault", _leaks(cases))
    for name in dict.fromkeys(case["fault"] for case in cases):
        these = [case for case in cases if case["fault"] == name]
        for what, figure in (("longest time without an answer", "silence"), ("whole again", "recovered")):
            yield Figure(f"{name}: {what}", "s", *reported([_number(case, figure) for case in these]))


def _leaks(cases: list[dict[str, Any]]) -> int:
    """Processes that have many more descriptors after their last fault than after their first."""
    counts: dict[str, list[int]] = {}
    for case in cases:
        for process, count in case["descriptors"].items():
            counts.setdefault(process, []).append(count)
    return sum(each[-1] - each[0] > MOST_DESCRIPTORS for each in counts.values())


def _table(cases: list[dict[str, Any]]) -> Table:
    table = Table(title="Faults, with the median and the largest of their times, in seconds")
    for header in ("fault", "times", "requests", "failed", "slowest whole", "silence", "whole again", "published"):
        table.add_column(header)
    for name in dict.fromkeys(case["fault"] for case in cases):
        these = [case for case in cases if case["fault"] == name]
        failed = Counter[str]()
        for error, count in (item for case in these for item in case["failed"].items()):
            failed[error.partition(": ")[2]] += count
        table.add_row(
            name,
            str(len(these)),
            str(sum(case["requests"] for case in these)),
            ", ".join(f"{count} {error}" for error, count in sorted(failed.items())),
            *(_spread([_number(case, figure) for case in these]) for figure in _TIMES),
        )
    return table


_TIMES = ("whole", "silence", "recovered", "published")


def _number(case: dict[str, Any], figure: str) -> float:
    found = case["slowest"].get("whole", 0.0) if figure == "whole" else case[figure]
    return float("nan") if found is None else float(found)


def _spread(values: list[float]) -> str:
    return f"{percentile(values, 50):.1f}, {max(values):.1f}"


def _begun(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.out.exists() and not arguments.fresh:
        found: dict[str, Any] = json.loads(arguments.out.read_text())
        return found
    return {"machine": machine.describe(), "setting": {"seed": arguments.seed}, "cases": []}


def _write(file: Path, record: dict[str, Any]) -> None:
    kept = {name: value for name, value in record.items() if name != "figures"}
    report.write(file, kept, _figures(record["cases"]))


# -- the machine ---------------------------------------------------------------------------------


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A small file system of its own for the head; None if none can be mounted here."""
    disk = folder / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        yield None
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _show_logs(folder: Path) -> None:
    for log in (*folder.glob("*.log"), *folder.glob("trainer/*.log"), *folder.glob("disk/cluster/nats/nats.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="One or more of those that --list prints.")
    parser.add_argument("--minutes", type=float, default=600.0, help="No fault is begun after so many minutes.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="Makes all faults again.")
    parser.add_argument("--list", action="store_true", help="Prints the faults.")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
