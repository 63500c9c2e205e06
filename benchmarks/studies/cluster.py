"""Measures a head and its replicas: what the router adds to an answer, and how fast a version reaches every node.

    python benchmarks/studies/cluster.py [--only PART ...] [--repeats N] [--out FILE]

    router       64 streams through the head against 64 streams to its replica: first tokens, each token, memory
    paced        1, 2 and 3 engines that answer at a fixed pace, behind the router of a head; tokens per second while
                 every client has a request
    real         1 and 2 engines with the bundled model, each on one core
    sharing      versions of 20 MB: pulled by two processes at once, and published beside 16 rows of a replica

All nodes run on this machine, and each computes on one thread: with more than there are cores, they wait for each
other, and two servers were eight times slower than one. Takes fifteen minutes on two cores, prints a table and writes
JSON.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.cluster import routing, sharing
from benchmarks.lib.cluster.nodes import cluster, small_model
from benchmarks.lib.cluster.routing import Added
from benchmarks.lib.cluster.sharing import Shared
from benchmarks.lib.figures import Figure, errors, reported
from benchmarks.lib.load import Load
from benchmarks.lib.peers import cancelled_by_sigterm

RECORD = report.RESULTS / "cluster.json"
PARTS = ("router", "paced", "real", "sharing")
ENGINES = (1, 2, 3)
VERSIONS = 8
MEDIAN_MS, P99_MS, MEMORY_MB, LEAST_GAIN, FETCH_MS, PUBLISH_S = 5.0, 20.0, 80.0, 1.9, 200.0, 1.0


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    before = machine.describe()
    machine.warn_if_busy()
    figures, record = asyncio.run(cancelled_by_sigterm(_measured(arguments)))
    report.show(figures)
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **record}, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


async def _measured(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    figures: list[Figure] = []
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cluster_") as created:
        folder = Path(created)
        model = small_model(folder / "model")
        if "router" in arguments.only:
            added = await routing.added(model, folder, arguments.repeats)
            memory = await routing.memory(model, folder)
            figures += _of_router(added, memory)
            record["router"] = [asdict(one) for one in added]
        if "paced" in arguments.only:
            rounds = [
                [await routing.paced_rate(model, folder, count) for count in ENGINES] for _ in range(arguments.repeats)
            ]
            figures += _of_rates("paced", rounds)
        if "real" in arguments.only:
            figures += _of_rates("real", [[await _real_rate(folder, count) for count in ENGINES[:2]]])
        if "sharing" in arguments.only:
            adapters = await asyncio.to_thread(sharing.adapter_folders, folder / "adapters", VERSIONS)
            async with cluster(None, 2, folder) as nodes:
                shared = await sharing.share(nodes, adapters)
            figures += _of_sharing(shared)
            record["sharing"] = [asdict(one) for one in shared]
    return figures, record


async def _real_rate(folder: Path, engines: int) -> Load:
    async with cluster(None, engines - 1, folder) as nodes:
        return await routing.rate(nodes, engines)


def _of_router(added: list[Added], memory: float) -> Iterator[Figure]:
    for name, seconds, limit in (
        ("first token, median", [one.first_median for one in added], MEDIAN_MS),
        ("first token, 99 %", [one.first_p99 for one in added], P99_MS),
        ("each token, median", [one.each_median for one in added], MEDIAN_MS),
        ("each token, 99 %", [one.each_p99 for one in added], P99_MS),
    ):
        yield Figure(f"the router adds: {name}", "ms", *reported([1000 * each for each in seconds]), limit)
    yield Figure("a head takes more memory than a server alone", "MB", *reported([memory / 1e6]), MEMORY_MB)


def _of_rates(kind: str, rounds: list[list[Load]]) -> Iterator[Figure]:
    """`rounds`: each has the load of one engine, of two, and so on."""
    rates = [[routing.steady_rate(load) for load in loads] for loads in rounds]
    for count, each in enumerate(zip(*rates, strict=True), 1):
        yield Figure(f"{kind} engines: {count}", "tok/s", *reported(each))
    for count, each in enumerate(zip(*rounds, strict=True), 1):
        whole = [load.rate for load in each]
        yield Figure(f"{kind} engines: {count}, until the last answer has ended", "tok/s", *reported(whole))
    gain = reported([two / one for one, two, *_ in rates])
    limit = LEAST_GAIN if kind == "paced" else None
    yield Figure(f"two {kind} engines against one", "x", *gain, limit, at_least=True)
    failed = sum(len(load.errors) for loads in rounds for load in loads)
    yield errors(f"{kind} engines: requests that failed", failed)


def _of_sharing(shared: list[Shared]) -> Iterator[Figure]:
    yield Figure("size of a version", "MB", *reported([one.bytes / 1e6 for one in shared]))
    fetched = reported([1000 * one.fetched_s for one in shared])
    yield Figure("fetched and checked by two processes", "ms", *fetched, FETCH_MS)
    published = reported([one.published_s for one in shared])
    yield Figure("uploaded, staged on all nodes, beside 16 rows of one, and live", "s", *published, PUBLISH_S)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
