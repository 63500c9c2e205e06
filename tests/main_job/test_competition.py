"""Versions that compete in a real process on a tiny model: over HTTP, through a kill -9, with no request dropped."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from main_job.serving import Server, start, stop
from tiny import save_tiny

FLAGS = ("--enable-rl-training", "--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "0.01")
CONFIG = """
rl_training:
  update_frequency: 4
  competition:
    automatic: true
    share: 0.5
    smallest_effect: 0.9
"""
GROUP = [{"prompt_token_ids": [5, 6], "completion_token_ids": [token], "reward": float(token == 7)} for token in (7, 8)]


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    places = ("--model-path", str(tmp_path / "model"), "--checkpoint-dir", str(tmp_path / "run"))
    return (*places, "--config", str(tmp_path / "config.yaml"), *FLAGS)


def comparison(server: Server) -> dict[str, Any] | None:
    return next(iter(server.get("/v1/training/compare")["data"]), None)


def answered(server: Server, user: int, scores: dict[str, float] | None = None) -> str:
    """One request of a user, with feedback. Returns the version that answered."""
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "collect_trajectory": True, "user": f"user {user}"}
    answer = server.post("/v1/completions", **body)
    version = str(answer["lora_adapter"])
    score = scores[version] if scores else user % 2
    feedback = {"trajectory_id": answer["trajectory_ids"][0], "score": score}
    assert server.http.post("/v1/training/feedback", json=feedback).status_code in (200, 409)
    return version


@pytest.mark.slow
def test_a_new_version_wins_after_a_crash(command: tuple[str, ...]) -> None:
    server = start(*command)
    server.post("/v1/training/update", trajectories=GROUP)
    users = count()
    while (begun := comparison(server)) is None:
        answered(server, next(users))
    assert (begun["live"], begun["candidate"], begun["automatic"]) == ("default@1", "default@2", True)
    server.http.close()
    server.process.kill()
    server.process.wait()

    server = start(*command)
    again = comparison(server)
    assert again is not None
    assert (again["live"], again["candidate"], again["verdict"]) == ("default@1", "default@2", "running")
    assert again["candidate_rewards"] == again["live_rewards"] == 0
    server.post("/v1/training/pause")
    by_version: Counter[str] = Counter()
    over = threading.Event()

    def client(number: int) -> None:
        for user in count(number * 10_000):
            by_version[answered(server, user, {"default@1": -1.0, "default@2": 1.0})] += 1
            if over.is_set():
                return

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        try:
            while (now := comparison(server)) is not None and now["verdict"] == "running":
                time.sleep(0.05)
        finally:
            over.set()
        assert [each.result() for each in clients] == [None] * 3, "no request was dropped"
    assert now is not None
    assert now["verdict"] == "promoted"
    assert set(by_version) == {"default@1", "default@2"}
    assert {answered(server, user, {"default@2": 0.0}) for user in range(8)} == {"default@2"}
    stop(server)
