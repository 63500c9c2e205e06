"""A cluster whose versions change and whose nodes are stopped: no answer is of a wrong version, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from main_job.cluster_nodes import Cluster, adapters_for, answer, joined, nats_of, nodes_of, until
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


def ready(server: Server) -> int:
    return sum(node["ready"] for node in nodes_of(server).values())


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
