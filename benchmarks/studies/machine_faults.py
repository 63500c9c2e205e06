"""Fails, watches and delays every write of a server. Nothing that it has acknowledged may be lost. Linux only.

    python benchmarks/studies/machine_faults.py [--every 1] [--restarts 20] [--quick]

A client uses all that a server keeps: answers and rewards, updates, checkpoints, an adapter, the audit log, cached
prefixes. On a disk that is full, read-only or gives one error, from the n-th write of such a round on, for each n:
whatever fails must say so, completions must go on, and once the disk is well, all must succeed. Before each write and
amid it, in rounds and in a start, what SIGKILL would leave must have what was acknowledged; some of these images are
given to a server that starts from them. On a disk whose fsyncs take 2 and 10 seconds, other requests must not wait.
"""

from __future__ import annotations

import argparse
import copy
import errno
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.faults.kept import Acknowledged
from benchmarks.lib.faults.loops import Tried, each_moment, fail_each, restarted
from benchmarks.lib.faults.served import Client, Server, running
from benchmarks.lib.figures import Figure, errors, reported

FAULTS = {"full": (errno.ENOSPC, True), "read_only": (errno.EROFS, True), "one_error": (errno.EIO, False)}
FIRST_ROUNDS, IDLE_S, WAITS_S = 3, 3.0, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="Try each so-many-th write only.")
    parser.add_argument("--restarts", type=int, default=20, help="Servers that are started from an image.")
    parser.add_argument("--quick", action="store_true", help="Each 20th write, 2 restarts.")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "machine_faults.json")
    args = parser.parse_args()
    if args.quick:
        args.every, args.restarts = 20, 2
    record: dict[str, Any] = {"machine": machine.describe(), "setting": report.setting(args)}
    with tempfile.TemporaryDirectory() as temporary, running(Server(Path(temporary) / "server")) as client:
        for _ in range(FIRST_ROUNDS):
            client.round()
        wrong = list[str]()
        for name, (fault, lasts) in FAULTS.items():
            tried = fail_each(client, fault, range(0, sys.maxsize, args.every), lasts)
            record[name] = _record(name, tried) | {"reported": tried.reported}
            wrong += tried.wrong
        record["slow"] = [_slow(client, fsync_s, quick=args.quick) for fsync_s in (0.0, 2.0, 10.0)]
        wrong += restarted(client)
        moments, at_start, images = _moments(client, Path(temporary), args.restarts)
        record["killed"], record["killed_at_start"] = _record("killed", moments), _record("killed at start", at_start)
        found = _from_images(client, images)
        record["restarts"] = {"count": len(images), "lost": len(found)}
        wrong += [*moments.wrong, *at_start.wrong, *found]
    record["wrong"] = wrong
    print(*wrong, sep="\n")
    judged = list(figures(record))
    report.show(judged)
    report.write(args.out, record, judged)
    return int(any(figure.met is False for figure in judged))


def figures(record: Mapping[str, Any]) -> Iterator[Figure]:
    for name in (*FAULTS, "killed", "killed_at_start"):
        one, title = record[name], name.replace("_", " ")
        yield Figure(f"{title}: writes", "", *reported([one["writes"]]))
        yield errors(f"{title}: lost, or not said", one["wrong"])
    yield Figure("restarts from what a kill has left", "", *reported([record["restarts"]["count"]]))
    yield errors("acknowledged and lost after such a restart", record["restarts"]["lost"])
    for one in record["slow"]:
        disk = f"a disk that takes {one['fsync_s']:g} s to sync"
        yield Figure(f"{disk}: longest other request", "s", *reported([one["longest_other_s"]]), WAITS_S)
        yield Figure(f"{disk}: longest /health", "s", *reported([one["longest_health_s"]]), WAITS_S)


def _record(name: str, tried: Tried) -> dict[str, Any]:
    writes = tried.writes.total()
    print(f"{name:<16} {writes:>5} writes, {len(tried.wrong)} wrong: {dict(tried.writes)}", flush=True)
    return {"writes": writes, "by_call": dict(tried.writes), "wrong": len(tried.wrong)}


def _moments(client: Client, folder: Path, restarts: int) -> tuple[Tried, Tried, dict[Path, Acknowledged]]:
    """Looks at each moment of two rounds and of a start. Returns also the images that are kept."""
    kept, wanted = dict[Path, Acknowledged](), 480 // max(restarts, 1)
    image = folder / "image"

    def keep(number: int) -> None:
        if number % wanted == wanted // 2 and len(kept) < restarts:
            kept[folder / f"image{number}"] = copy.deepcopy(client.acknowledged)
            shutil.copytree(image, folder / f"image{number}")

    with each_moment(client, image, keep) as rounds:
        client.round()
        client.round()
        time.sleep(IDLE_S)  # the journal and the prefix cache write when the server is idle
    client.server.kill()
    with each_moment(client, image) as start:
        client.server.start()
    return rounds, start, kept


def _from_images(client: Client, images: dict[Path, Acknowledged]) -> list[str]:
    """Starts a server from each image, and returns what it has lost."""
    found, server = [], client.server
    for image, acknowledged in images.items():
        server.kill()
        again = Client(server, acknowledged)
        server.run = image
        server.start()
        found += [f"{image.name}: {each}" for each in again.lost(torn=True)]
    return found


def _slow(client: Client, fsync_s: float, quick: bool) -> dict[str, float]:
    """A round whose fsyncs take so long, beside another client's completions and probes."""
    over, http = threading.Event(), client.server.http
    longest = {"/v1/completions": 0.0, "/health": 0.0}

    def ask() -> None:
        while not over.is_set():
            for path in longest:
                began = time.monotonic()
                body = {"prompt": "a b", "max_tokens": 4} if "v1" in path else None
                http.request("POST" if body else "GET", path, json=body, timeout=600).raise_for_status()
                longest[path] = max(longest[path], time.monotonic() - began)

    client.server.disk.slow(fsync_s)
    asking = threading.Thread(target=ask)
    asking.start()
    began = time.monotonic()
    if quick:
        client.collect()
    else:
        client.round()
    found: dict[str, float] = {"fsync_s": fsync_s, "round_s": round(time.monotonic() - began, 2)}
    over.set()
    asking.join()
    client.server.disk.heal()
    found["longest_other_s"] = round(longest["/v1/completions"], 3)
    found["longest_health_s"] = round(longest["/health"], 3)
    print(f"fsync {fsync_s:g} s: {found}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
