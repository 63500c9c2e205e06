"""A server whose disk, clock or descriptors fail: what it has acknowledged is kept, and what fails says so.

`benchmarks/studies/machine_faults.py` tries every write; here it is a sample.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.lib.faults.disk import WORKS_HERE
from benchmarks.lib.faults.loops import each_moment, fail_each, restarted
from benchmarks.lib.faults.served import Client, Server, running

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        not WORKS_HERE, reason="the library that makes writes fail is for Linux, and needs a C compiler"
    ),
]

YEAR = 365.25 * 86400
COMPLETION = {"prompt": "a b", "max_tokens": 4}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running(Server(tmp_path_factory.mktemp("faults"))) as client:
        for _ in range(3):
            client.round()
        yield client


@pytest.fixture(autouse=True)
def well(client: Client) -> Iterator[None]:
    """After a test, the disk and the clock are well, and all works."""
    yield
    client.server.disk.heal()
    client.server.disk.shift_clock(0)
    before = client.refused
    client.resume()
    client.round()
    assert client.refused == before


@pytest.mark.parametrize(
    ("fault", "lasts"),
    [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EIO, False)],
    ids=["full", "read-only", "EIO"],
)
def test_what_fails_says_so_and_the_rest_goes_on(client: Client, fault: int, lasts: bool) -> None:
    tried = fail_each(client, fault, range(fault % 10, 150, 25), lasts)
    assert not tried.wrong
    assert tried.writes.total() >= 4
    assert tried.reported >= 1


def test_sigkill_at_any_moment_leaves_what_was_acknowledged(client: Client, tmp_path: Path) -> None:
    with each_moment(client, tmp_path / "image") as tried:
        client.round()
    assert not tried.wrong
    assert tried.writes["write"] > 50
    assert tried.writes["half of write"] > 20


def test_no_other_request_waits_for_a_slow_disk(client: Client) -> None:
    """Three commits of the journal, one after the other."""
    gaps, over, http = [0.0], threading.Event(), client.server.http

    def ask() -> None:
        while not over.is_set():
            began = time.monotonic()
            for path in ("/v1/completions", "/health"):
                answer = http.request("POST" if "v1" in path else "GET", path, json=COMPLETION)
                assert answer.status_code == 200
            gaps.append(time.monotonic() - began)

    other = threading.Thread(target=ask)
    client.server.disk.slow(fsync_s=2.0)
    other.start()
    began = time.monotonic()
    assert client.collect()
    took = time.monotonic() - began
    over.set()
    other.join()
    assert took > 4
    assert max(gaps) < 2


def test_without_free_descriptors_connected_clients_are_answered(client: Client) -> None:
    import resource

    server = client.server
    assert server.process is not None
    pid, log = server.process.pid, server.output.stat().st_size
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        client.answer()  # so that its connection is open
        free = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limits)
        base = server.http.base_url
        for _ in range(30):
            stack.enter_context(socket.create_connection((base.host, base.port or 0)))
        until = time.monotonic() + 3
        while time.monotonic() < until:
            client.answer()
            time.sleep(0.1)
        saved = server.http.post("/training/checkpoint", json={"checkpoint_name": "x"})
        assert (saved.status_code, "ulimit -n" in saved.text) == (507, True)
    assert server.output.stat().st_size - log < 20_000, "nothing floods the log"
    with httpx.Client(base_url=server.http.base_url, timeout=30) as new:
        assert new.get("/health").status_code == 200


def test_a_clock_that_jumps_changes_no_order_and_ends_nothing(client: Client) -> None:
    http, before = client.server.http, client.refused
    stored = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()["id"]
    for seconds in (86400.0, -86400.0, YEAR, -56 * YEAR):
        client.server.disk.shift_clock(seconds)
        created = http.post("/v1/completions", json=COMPLETION).json()["created"]
        assert abs(created - time.time() - seconds) < 60
        client.round()
        client.round()
        assert http.get(f"/v1/responses/{stored}").status_code == 200
    assert client.refused == before
    cards = http.get("/v1/checkpoints").json()["data"]
    steps = [card["step"] for card in cards if card["lora_adapter"].startswith("default@")]
    assert steps == sorted(steps), "they are in the order in which they were saved"
    assert "latest" in cards[-1]["tags"]
    assert not restarted(client), "nothing is lost after all this"
