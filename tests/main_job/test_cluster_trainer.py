"""A real trainer of a cluster: what clients send to any node is trained on once, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from main_job.cluster_nodes import Cluster, joined, nats_of, nodes_of, until
from main_job.serving import Server
from main_job.test_cluster_restarts import kill
from tiny import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAJECTORIES, GROUP, UPDATE = 500, 2, 10
COLLECTING = ("--group-size", str(GROUP), "--prompts-per-step", str(UPDATE // GROUP), "--learning-rate", "1e-5")
REWARD = """
import zlib

def score(completion):
    return zlib.crc32(completion.encode()) / 2**32
"""
FALLING = """
import zlib
from pathlib import Path

def score(completion):
    before = 0.0 if Path(__file__).with_name("fallen").exists() else 0.8
    return before + zlib.crc32(completion.encode()) / 2**32 / 5
"""
TASKS = [{"prompt": f"{number}: say something", "answer": "a"} for number in range(8)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_tiny("llama", folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


@pytest.fixture
def cluster(files: Path, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, files / "model") as nodes:
        yield nodes


def reward_of(files: Path) -> tuple[str, ...]:
    return ("--reward", f"{files / 'rewards.py'}:score")


def is_trained(server: Server) -> bool:
    """Whether requests to the base model are collected."""
    return bool(collected(server.http, 0))


def collected(http: httpx.Client, number: int, model: str = "base-model", tokens: int = 8) -> list[str]:
    """The ids of a request's trajectories, if they are kept."""
    body = {
        "model": model,
        "prompt": f"{number}: The quick brown fox",
        "max_tokens": tokens,
        "temperature": 1,
        "n": GROUP,
        "seed": number,
        "collect_trajectory": True,
        "scoring_function": "reward",
    }
    answer = http.post("/v1/completions", json=body)
    if not answer.is_success or "trajectory_warning" in answer.json():
        return []
    ids: list[str] = answer.json()["trajectory_ids"]
    return ids


def rows(journal: Path, query: str) -> list[tuple[Any, ...]]:
    if not journal.exists():
        return []
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def trained(journal: Path) -> Counter[str]:
    """How many updates of the run each trajectory is in."""
    bodies = [json.loads(body) for (body,) in rows(journal, "SELECT body FROM changes WHERE kind = 'update'")]
    return Counter(
        one
        for body in bodies
        for group in body["groups"]
        for episode in group["episodes"]
        for one in episode["trajectory_ids"]
    )


class Client(threading.Thread):
    """Sends requests to be collected until enough are, and again what failed. `acknowledged`: ids of trajectories."""

    def __init__(self, url: str, wanted: int, model: str = "base-model") -> None:
        super().__init__(daemon=True)
        self._url, self.wanted, self._model = url, wanted, model
        self.acknowledged: list[str] = []

    def run(self) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while len(self.acknowledged) < self.wanted:
                number += 1
                try:
                    self.acknowledged += collected(http, number, self._model)
                except httpx.TransportError:
                    time.sleep(0.1)

    def has(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.acknowledged) >= count


def test_each_trajectory_is_trained_on_once_though_trainer_nats_and_head_are_killed(
    cluster: Cluster, files: Path
) -> None:
    head, _ = joined(cluster, 1)
    flags = (*COLLECTING, *reward_of(files), "--max-staleness", "1000", "--checkpoint-interval", "5")
    trainer, journal = cluster.trainer("run", *flags), cluster.journal("run")
    until(lambda: is_trained(head), 60)
    client = Client(head.url, TRAJECTORIES)
    client.start()
    until(client.has(120), 120)
    trainer.kill()
    trainer.wait()
    killed = time.monotonic()
    at_kill = len(trained(journal))
    trainer = cluster.trainer("run", *flags)
    until(lambda: len(trained(journal)) > at_kill, 60)
    print(f"the trainer went on {time.monotonic() - killed:.1f} s after it was killed, with its start")
    until(client.has(250), 120)
    os.kill(nats_of(head), signal.SIGKILL)
    until(client.has(350), 120)
    before, registry = nats_of(head), head.get("/v1/cluster")["versions"]
    kill(head)
    until(lambda: not is_alive(before))
    again = cluster.head()
    ready = time.monotonic()
    assert [each["version"] for each in registry][-1] <= again.get("/v1/cluster")["versions"][-1]["version"]
    until(lambda: sum(node["ready"] for node in nodes_of(again).values()) == 2)
    print(f"the replica was back {time.monotonic() - ready:.2f} s after the head was ready")
    client.join(120)
    assert not client.is_alive()
    acknowledged = set(client.acknowledged)
    until(lambda: len(acknowledged - trained(journal).keys()) < UPDATE, 120)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == 128 + signal.SIGTERM, cluster.said("run")[-2000:]
    counts = trained(journal)
    waiting = {one for (one,) in rows(journal, "SELECT trajectory_id FROM intake WHERE kind = 'trajectory'")}
    dropped = rows(journal, "SELECT trajectory_id, reason FROM ends WHERE state = 'dropped'")
    assert acknowledged <= waiting, "each that was acknowledged has come to the trainer"
    assert not dropped
    assert len(acknowledged - counts.keys()) < UPDATE, "the rest waits for the next update"
    assert set(counts.values()) == {1}
    print(f"{len(acknowledged)} acknowledged, {len(counts)} trained on, each once")


def test_when_rewards_fall_the_nodes_get_the_best_version_again_and_training_goes_on(
    cluster: Cluster, files: Path, tmp_path: Path
) -> None:
    head, (replica,) = joined(cluster, 1)
    (tmp_path / "rewards.py").write_text(FALLING)
    reward = ("--reward", f"{tmp_path / 'rewards.py'}:score")
    cluster.trainer("run", *COLLECTING, *reward, "--max-staleness", "1000")
    until(lambda: is_trained(head), 60)
    Client(head.url, UPDATE).run()
    until(lambda: live(head), 60)
    client = Client(head.url, 100_000, "default")
    client.start()
    until(lambda: live(head) >= 8, 120)
    (tmp_path / "fallen").touch()
    until(lambda: "is live again" in cluster.said("run"), 120)
    given_up = live(head)
    until(lambda: live(head) > given_up + 2, 60)
    until(lambda: live(replica) > given_up + 2)
    number = int(str(replica.ask("default").adapter).partition("@")[2])
    assert number > given_up + 2
    client.wanted = 0
    client.join(60)


def live(server: Server) -> int:
    """The number of the live version that a node knows; 0: there is none."""
    return max((each["version"] for each in server.get("/v1/cluster")["versions"] if each["live"]), default=0)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_on_an_environment_samples_at_the_head_and_goes_on_when_that_is_started_again(
    cluster: Cluster, files: Path
) -> None:
    head, (replica,) = joined(cluster, 1)
    environment = ("--environment", str(files / "tasks.jsonl"), *reward_of(files), "--max-tokens", "8")
    shape = ("--group-size", "2", "--prompts-per-step", "4", "--learning-rate", "1e-3")
    trainer = cluster.trainer("run", *environment, *shape, "--steps", "12")
    until(lambda: head.get("/v1/cluster")["versions"], 90)
    kill(head)
    again = cluster.head()
    assert trainer.wait(180) == 0, cluster.said("run")[-2000:]
    versions = {each["version"]: each["live"] for each in again.get("/v1/cluster")["versions"]}
    assert versions[12]
    until(lambda: replica.get("/v1/cluster")["versions"])
    assert again.ask("default").adapter == until(lambda: replica.ask("default").adapter) == "default@12"
    sent = {node["role"]: node["requests"] for node in nodes_of(again).values()}
    assert sent["replica"] > 0
    assert sent["head"] > 0
