"""`mlx_parallm forget` on a real server that keys teach, through a kill."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from main_job.serving import Server, start, stop
from tiny import save_tiny

from mlx_parallm.cli.main import main

pytestmark = pytest.mark.ci
KEYS = ("ann", "bob")


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    save_tiny("llama", tmp_path / "model")
    config = tmp_path / "config.yaml"
    config.write_text("checkpointing:\n  interval: 4\n")
    training = ("--enable-rl-training", "--lora-rank", "4", "--learning-rate", "0.01", "--update-frequency", "1000")
    folders = ("--checkpoint-dir", str(tmp_path / "run"), "--config", str(config))
    return ("--model-path", str(tmp_path / "model"), "--keys-file", str(tmp_path / "keys.json"), *training, *folders)


def key(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], role: str = "train") -> str:
    assert main(["keys", "add", name, "--keys-file", str(tmp_path / "keys.json"), "--role", role]) == 0
    return next(word for word in capsys.readouterr().out.split() if word.startswith("sk-"))


def teach(server: Server, headers: dict[str, str], number: int) -> None:
    """A group of answers to one prompt, with rewards that differ."""
    body = {"prompt": [5, 6, 7 + number], "max_tokens": 5, "n": 4, "collect_trajectory": True, "seed": number}
    answer = server.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    for place, one in enumerate(answer.json()["trajectory_ids"]):
        sent = {"trajectory_id": one, "score": place / 4}
        assert server.http.post("/v1/training/feedback", json=sent, headers=headers).status_code == 200


def test_a_key_is_forgotten_although_the_server_is_killed_meanwhile(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    admin = {"Authorization": f"Bearer {key(tmp_path, 'boss', capsys, 'admin')}"}
    keys = {name: {"Authorization": f"Bearer {key(tmp_path, name, capsys)}"} for name in KEYS}
    server = start(*flags)
    for number in range(12):
        for headers in keys.values():
            teach(server, headers, number)
        assert server.http.post("/v1/training/update", json={}, headers=admin).json()["status"] == "published"
    asking = ["forget", "--key", "bob", "--url", server.url, "--api-key", admin["Authorization"].split()[1]]
    assert main(asking) == 0
    said = capsys.readouterr().out
    assert "updates that have learnt from it" in said
    assert "nothing was changed; --yes does it" in said
    refused = server.http.post("/v1/training/forget", json={"key": "ann"}, headers=keys["ann"])
    assert refused.status_code == 403
    assert server.http.post("/v1/training/forget", json={"key": "bob"}, headers=admin).status_code == 200
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server = start(*flags)
    card = ended(server, admin)
    assert card["state"] == "done", card
    listed = json.dumps(server.http.get("/v1/training/trajectories?limit=100", headers=admin).json())
    assert '"bob"' not in listed
    asking[4] = server.url
    assert main(asking) == 0
    assert "nothing is kept of the key bob" in capsys.readouterr().out
    asking[2] = "ann"
    assert main([*asking, "--from-scratch", "--yes"]) == 0
    assert "forgot the key ann" in capsys.readouterr().out
    stop(server)
    assert b"bob" not in b"".join(path.read_bytes() for path in (tmp_path / "run").glob("journal.sqlite*"))


def ended(server: Server, admin: dict[str, str]) -> Any:
    while True:
        answer: httpx.Response = server.http.get("/v1/training/forget", headers=admin)
        if (card := answer.json())["state"] not in ("rebuilding", "removing"):
            return card
        time.sleep(0.05)
