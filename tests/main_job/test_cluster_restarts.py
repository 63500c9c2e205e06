"""A cluster whose parts are killed and started again: it still knows its versions, and no answer is of a wrong one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from main_job.cluster_nodes import Cluster, adapters_for, answer, answer_or_none, joined, nats_of, nodes_of, until
from main_job.serving import Server

pytestmark = pytest.mark.slow

CONTENTS, PUBLISHES, CLIENTS = 5, 50, 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters_for(tmp_path_factory.mktemp("files"), CONTENTS)


@pytest.fixture
def cluster(files: Path, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, files / "model") as nodes:
        yield nodes


def versions_of(server: Server) -> list[dict[str, Any]]:
    versions: list[dict[str, Any]] = server.get("/v1/cluster")["versions"]
    return versions


def ready(server: Server) -> int:
    return sum(node["ready"] for node in nodes_of(server).values())


def answer_of(server: Server, version: str) -> tuple[str, str] | None:
    """The answer if it is of this version."""
    said = answer_or_none(server)
    return said if said is not None and said[1] == version else None


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def kill(server: Server) -> None:
    assert server.process is not None
    server.process.kill()
    server.process.wait()


def test_a_head_that_was_killed_has_the_same_registry_and_replicas_come_back(cluster: Cluster, files: Path) -> None:
    head, (replica,) = joined(cluster, 1)
    for number in (1, 2):
        cluster.publish("math", number, files / f"adapter-{number}")
    before, said, nats = versions_of(head), answer(head, 0), nats_of(head)
    kill(head)
    assert answer(replica, 0) == said, "a replica serves its own clients without a head"
    until(lambda: not is_running(nats))
    again = cluster.head()
    assert answer(again, 0) == said, "it has its versions when it is ready"
    started = time.monotonic()
    until(lambda: ready(again) == 2)
    print(f"the replica was back {time.monotonic() - started:.2f} s after the head was ready")
    assert time.monotonic() - started < 5
    assert versions_of(again) == before
    cluster.publish("math", 3, files / "adapter-3")
    assert until(lambda: answer_of(again, "math@3")) == until(lambda: answer_of(replica, "math@3"))


def test_nats_that_was_killed_is_started_again_and_no_request_notices(cluster: Cluster, files: Path) -> None:
    head, (_replica,) = joined(cluster, 1)
    cluster.publish("math", 1, files / "adapter-1")
    before, nats = versions_of(head), nats_of(head)
    expected = {number: answer(head, number, 600) for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        answers = {number: pool.submit(answer, head, number, 600) for number in expected}
        os.kill(nats, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: not head.get("/v1/cluster")["connected"])
        until(lambda: head.get("/v1/cluster")["connected"] and ready(head) == 2)
        print(f"the cluster was whole again {time.monotonic() - killed:.2f} s after NATS was killed")
        assert time.monotonic() - killed < 5
        assert {number: each.result() for number, each in answers.items()} == expected
    status = head.get("/v1/cluster")
    assert (status["nodes_lost"], status["streams_broken"], status["requests_retried"]) == (0, 0, 0)
    assert versions_of(head) == before
    assert nats_of(head) != nats
    cluster.publish("math", 2, files / "adapter-2")
    assert until(lambda: answer_of(head, "math@2"))


def test_no_answer_is_of_another_version_than_it_says(cluster: Cluster, files: Path) -> None:
    head, _ = joined(cluster, 2)
    expected = {}
    for number in range(1, CONTENTS + 1):
        cluster.publish("solo", number, files / f"adapter-{number}")
        expected[number] = answer(head, 0, model="solo")[0]
    assert len(set(expected.values())) == CONTENTS
    cluster.publish("math", 1, files / "adapter-1")
    over, numbers = Event(), count(2)

    def ask(_: int) -> list[tuple[str, str]]:
        heard = []
        while not over.is_set():
            heard.append(answer(head, 0))
        return heard

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, client) for client in range(CLIENTS)]
        try:
            for number in (next(numbers) for _ in range(PUBLISHES)):
                cluster.publish("math", number, files / f"adapter-{content_of(number)}")
        finally:
            over.set()
        heard = [said for each in asking for said in each.result()]
    by_node = [node["requests"] for node in nodes_of(head).values()]
    print(f"{len(heard)} answers of {len({version for _, version in heard})} versions, by node: {by_node}")
    assert all(by_node)
    for text, version in heard:
        assert text == expected[content_of(int(version.rpartition("@")[2]))], version


def content_of(number: int) -> int:
    return 1 + (number - 1) % CONTENTS


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_each_node_with_all_that_it_has_started(
    cluster: Cluster, files: Path, tmp_path: Path, how: signal.Signals
) -> None:
    head, (replica,) = joined(cluster, 1)
    cluster.publish("math", 1, files / "adapter-1")
    nats = nats_of(head)
    for node in (replica, head):
        assert node.process is not None
        node.process.send_signal(how)
        assert node.process.wait(timeout=20) == 0
        if node is replica:
            until(lambda: ready(head) == 1)
            assert head.get("/v1/cluster")["nodes_lost"] == 0, "it said that it goes"
    until(lambda: not is_running(nats))
    left = [file.name for file in (tmp_path / "cluster").rglob("*") if file.name.startswith(".") or ".tmp" in file.name]
    assert left == []
