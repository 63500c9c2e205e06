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
from lora import layout_of, random_adapter
from main_job.cluster_nodes import TOKEN, Cluster, nodes_of, until
from main_job.serving import Server, start
from tiny import save_tiny

from mlx_parallm.adapters.files.write import write_peft

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over the lazy dog"
WHOLE, STREAMS = 16, 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another one, and versions of an adapter."""
    folder = tmp_path_factory.mktemp("files")
    layout = layout_of(save_tiny("llama", folder / "model"))
    save_tiny("llama", folder / "other", hidden_size=96)
    for number in (1, 2, 3):
        write_peft(folder / f"adapter-{number}", random_adapter(layout, number, rank=4), layout, None)
    return folder


@pytest.fixture
def cluster(files: Path, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, files / "model") as nodes:
        yield nodes


def body(number: int = 0, tokens: int = 24, **fields: Any) -> dict[str, Any]:
    return {
        "model": "math",
        "prompt": f"{number}: {PROMPT}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def answer(server: Server, number: int, tokens: int = 24) -> tuple[str, str]:
    found = server.post("/v1/completions", **body(number, tokens))
    return found["choices"][0]["text"], found["lora_adapter"]


def events(server: Server, number: int, tokens: int) -> list[dict[str, Any]]:
    """The events of a stream, without its end mark."""
    with server.http.stream("POST", "/v1/completions", json=body(number, tokens, stream=True)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(cluster: Cluster, replicas: int) -> tuple[Server, list[Server]]:
    head = cluster.head()
    others = [cluster.replica() for _ in range(replicas)]
    until(lambda: sum(node["ready"] for node in nodes_of(head).values()) == replicas + 1)
    return head, others


def test_nodes_serve_the_model_and_the_versions_of_the_head(cluster: Cluster, files: Path) -> None:
    head, (replica,) = joined(cluster, 1)
    cluster.publish("math", 1, files / "adapter-1")
    expected = answer(head, 0)
    assert expected[1] == "math@1"
    until(lambda: answer_or_none(replica) == expected)
    late = cluster.replica()
    loaded = time.monotonic()
    until(lambda: answer_or_none(late) == expected)
    print(f"a late replica served the live version {time.monotonic() - loaded:.2f} s after it had loaded")
    cluster.publish("math", 2, files / "adapter-2")
    newer = answer(head, 0)
    assert newer[1] == "math@2"
    assert newer[0] != expected[0]
    until(lambda: answer_or_none(replica) == answer_or_none(late) == newer)


def answer_or_none(server: Server) -> tuple[str, str] | None:
    found = server.http.post("/v1/completions", json=body(0))
    return (found.json()["choices"][0]["text"], found.json()["lora_adapter"]) if found.is_success else None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_costs_no_whole_request(cluster: Cluster, files: Path, how: signal.Signals) -> None:
    head, (first, _) = joined(cluster, 2)
    cluster.publish("math", 1, files / "adapter-1")
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
    with pytest.raises(AssertionError, match="the server ended with 2"):
        cluster.replica("--model-path", str(files / "other"))
    with pytest.raises(AssertionError, match="the server ended with 2"):
        start("--connect-to", cluster.address, "--cluster-token", f"not-{TOKEN}")
