"""The dashboard of nodes of a cluster, with real processes and a tiny model. Look at its screenshots, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.dashboards import browse, needs_chromium, needs_npm
from clients.running import Report
from main_job.cluster_nodes import Cluster, adapters_for, answer, answer_or_none, joined, nats_of, until
from main_job.serving import Server

MOST_KB, MOST_BYTES = 200, 100_000

pytestmark = [pytest.mark.timeout(900), needs_npm, needs_chromium]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A head and a replica with two versions, of which the second is live, and four requests answered."""
    files = adapters_for(tmp_path_factory.mktemp("files"), 2)
    with Cluster(tmp_path_factory.mktemp("nodes"), files / "model") as cluster:
        head, _ = joined(cluster, 1)
        for number in (1, 2):
            cluster.publish("math", number, files / f"adapter-{number}")
        until(lambda: (answer_or_none(head) or ("", ""))[1] == "math@2")
        for number in range(4):
            answer(head, number)
        yield cluster.nodes


def test_every_look_of_a_head(nodes: list[Server], pictures: Path, report: Report) -> None:
    head = nodes[0]
    for seen in browse("cluster.looks", head.url, pictures, nodes=2).values():
        assert seen["figures"]["Nodes ready"] == "2"
        assert int(seen["figures"]["Requests"]) >= 5
        assert (seen["figures"]["Retried"], seen["figures"]["Nodes lost"]) == ("0", "0")
        assert [row.split("\t")[1] for row in seen["nodes"]] == ["head", "replica"]
        assert "this server" in seen["nodes"][0]
        assert all("2 of 2" in row for row in seen["nodes"])
        assert seen["versions"][0].startswith("math@2\tlive\t2 of 2 nodes")
        assert seen["versions"][1].startswith("math@1\t\t2 of 2 nodes")
        report("page with the view Cluster", seen["kilobytes"], "kB", MOST_KB)
        assert seen["kilobytes"] < MOST_KB


def test_the_picture_of_the_documentation(nodes: list[Server], pictures: Path) -> None:
    assert browse("pictures.take", nodes[0].url, pictures, views="cluster") == []
    assert 0 < (pictures / "cluster.webp").stat().st_size < MOST_BYTES


def test_a_node_without_nats_says_so(nodes: list[Server], pictures: Path) -> None:
    head = nodes[0]
    nats = nats_of(head)
    os.kill(nats, signal.SIGSTOP)
    try:
        seen = browse("cluster.cut_off", head.url, pictures)
    finally:
        os.kill(nats, signal.SIGCONT)
    assert seen["said"].startswith("This node has no connection to NATS")
    assert (seen["figures"]["Nodes ready"], seen["figures"]["Nodes lost"]) == ("2", "0")


def test_a_node_says_which_version_it_cannot_serve(tmp_path: Path, pictures: Path) -> None:
    files = adapters_for(tmp_path / "files", 1)
    with Cluster(tmp_path, files / "model") as cluster:
        head = cluster.head()
        replica = cluster.replica("--max-lora-rank", "2")
        until(lambda: sum(node["ready"] for node in head.get("/v1/cluster")["nodes"]) == 2)
        cluster.publish("math", 1, files / "adapter-1")
        until(lambda: replica.get("/v1/cluster")["unusable"])
        seen = browse("cluster.unusable", replica.url, pictures)
    assert seen["reasons"].startswith("math@1\n")
    assert "rank" in seen["reasons"]
    assert (seen["figures"]["Nodes ready"], seen["figures"]["Retried"]) == ("2", "–")


def test_a_server_that_is_no_node_says_how_to_start_a_cluster(server: Server, pictures: Path) -> None:
    (command,) = browse("pages.commands", server.url, pictures, view="cluster")["commands"]
    assert command.endswith(" --mode inference --share-model"), "the server's own command"
