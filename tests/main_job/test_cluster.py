"""A real head with replicas: one model, the same adapter versions, and no whole request lost with a replica."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from main_job.cluster_nodes import (
    TOKEN,
    Cluster,
    adapters_for,
    answer,
    answer_or_none,
    body,
    joined,
    nodes_of,
    until,
)
from main_job.serving import Server, start
from tiny import save_tiny

pytestmark = pytest.mark.slow

WHOLE, STREAMS = 16, 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = adapters_for(tmp_path_factory.mktemp("files"), 2)
    save_tiny("llama", folder / "other", hidden_size=96)
    return folder


@pytest.fixture
def cluster(files: Path, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, files / "model") as nodes:
        yield nodes


def events(server: Server, number: int, tokens: int) -> list[dict[str, Any]]:
    """The events of a stream, without its end mark."""
    with server.http.stream("POST", "/v1/completions", json=body(number, tokens, stream=True)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_nodes_serve_the_model_and_the_versions_of_the_head(cluster: Cluster, files: Path) -> None:
    head, (replica,) = joined(cluster, 1)
    cluster.publish("math", 1, files / "adapter-1")
    expected = until(lambda: answer_or_none(head))
    assert expected[1] == "math@1"
    until(lambda: answer_or_none(replica) == expected)
    late = cluster.replica()
    loaded = time.monotonic()
    until(lambda: answer_or_none(late) == expected)
    print(f"a late replica served the live version {time.monotonic() - loaded:.2f} s after it had loaded")
    assert time.monotonic() - loaded < 5
    cluster.publish("math", 2, files / "adapter-2")
    newer = until(lambda: said if (said := answer(head, 0))[1] == "math@2" else None)
    assert newer[0] != expected[0]
    until(lambda: answer_or_none(replica) == answer_or_none(late) == newer)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_costs_no_whole_request(cluster: Cluster, files: Path, how: signal.Signals) -> None:
    head, (first, _) = joined(cluster, 2)
    cluster.publish("math", 1, files / "adapter-1")
    until(lambda: answer_or_none(head))
    tokens = 400
    expected = [answer(head, number, tokens) for number in range(WHOLE)]
    with ThreadPoolExecutor(WHOLE + STREAMS) as pool:
        whole = [pool.submit(answer, head, number, tokens) for number in range(WHOLE)]
        streams = [pool.submit(events, head, number, 1500) for number in range(STREAMS)]
        until(lambda: nodes_of(head)[first.url]["outstanding_tokens"] > 0)
        time.sleep(0.5)
        assert first.process is not None
        first.process.send_signal(how)
        stopped = time.monotonic()
        until(lambda: first.url not in nodes_of(head))
        seen = time.monotonic() - stopped
        assert [each.result() for each in whole] == expected
        ends = [each.result()[-1] for each in streams]
    status = head.get("/v1/cluster")
    broken = sum("error" in end for end in ends)
    print(f"{how.name}: lost after {seen:.2f} s; {broken} streams broken, {status['requests_retried']} retried")
    assert seen < 4
    assert status["streams_broken"] == broken
    assert status["requests_retried"] > 0
    for end in ends:
        assert (
            end["error"]["code"] == "node_failed" if "error" in end else end["choices"][0]["finish_reason"] == "length"
        )


def test_strangers_are_refused(cluster: Cluster, files: Path) -> None:
    head = cluster.head()
    join = {"role": "replica", "url": "http://127.0.0.1:9", "version": "0"}
    assert head.http.post("/v1/cluster/join", json=join).status_code == 401
    refused = head.http.post("/v1/cluster/join", json=join, headers={"authorization": f"Bearer {TOKEN}"})
    assert refused.status_code == 409
    assert "install the same" in refused.json()["error"]["message"]
    with pytest.raises(AssertionError, match="the server ended with 2"):
        cluster.replica("--model-path", str(files / "other"))
    with pytest.raises(AssertionError, match="the server ended with 2"):
        start("--connect-to", cluster.address, "--cluster-token", f"not-{TOKEN}")
