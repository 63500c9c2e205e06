"""Training on a tiny model over HTTP, and without inference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from main_job.serving import Server, in_thread
from tiny import save_tiny

pytestmark = pytest.mark.ci
FLAGS = ("--enable-rl-training", "--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "0.01")
GROUP = 4
HANGS = f"(?s)(?:{'|'.join('.' * 60)})*(?!)"
"""A pattern that tries 60 to the power of the text's length ways, and matches none."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny("llama", path)
    return path


def flags(model: Path, folder: Path, *more: str) -> tuple[str, ...]:
    """Checkpoints after every update."""
    config = folder / "config.yaml"
    config.write_text("checkpointing:\n  interval: 1\nrl_training:\n  scoring_timeout_s: 2\n")
    checkpoints = ("--checkpoint-dir", str(folder / "checkpoints"))
    return ("--model-path", str(model), "--config", str(config), *FLAGS, *checkpoints, *more)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with in_thread(*flags(model, tmp_path, "--update-frequency", "8")) as running:
        yield running


def update(server: Server) -> Any:
    """One update of two groups."""
    given = [
        {"prompt_token_ids": [5 + at // 4, 6], "completion_token_ids": [10 + at, 20], "reward": at % 4 / 4}
        for at in range(2 * GROUP)
    ]
    return server.post("/v1/training/update", trajectories=given)


def collected(server: Server, **fields: Any) -> Any:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "n": GROUP, "collect_trajectory": True, "seed": 1, **fields}
    return server.post("/v1/completions", **body)


def waited_for(server: Server, updates: int) -> Any:
    """The status once so many updates are made, and their checkpoints saved."""
    while (status := server.get("/v1/training/status"))["updates_total"] < updates or status["state"] == "updating":
        time.sleep(0.02)
    return status


def test_requests_become_a_new_version_that_serves_the_next_ones(server: Server) -> None:
    assert server.get("/v1/training/status")["current_lora"] is None
    answers = [
        collected(server, scoring_function="regex", metadata={"pattern": "[a-z]"}, seed=seed, max_tokens=3)
        for seed in (1, 2)
    ]
    ids = [trajectory for answer in answers for trajectory in answer["trajectory_ids"]]
    assert len(set(ids)) == 2 * GROUP
    status = waited_for(server, 1)
    assert status["current_lora"] == "default@1"
    assert status["trajectories_collected"] == 2 * GROUP
    assert status["available_checkpoints"] == ["checkpoint-1", "latest"]
    assert status["last_update"].endswith("Z")
    answer = server.post("/v1/completions", prompt="Hello", max_tokens=2)
    assert answer["lora_adapter"] == "default@1"
    kept = {each["trajectory_id"]: each for each in server.get("/debug/trajectories?limit=100")["data"]}
    assert kept.keys() == set(ids)
    for each in kept.values():
        assert each["state"] in ("trained", "dropped")
        assert len(each["sampling_logprobs"]) == len(each["completion_token_ids"])
    text = server.http.get("/metrics").text
    for name in ("trajectories_collected", "training_loss", "updates_per_second"):
        assert f'\nmlx_parallm_rl_{name}{{adapter="default"}} ' in text
    assert "\nmlx_parallm_lora_swaps_total " in text
    assert "\nmlx_parallm_checkpoint_saves_total 1.0" in text


def test_feedback_comes_later_and_unmarked_requests_are_never_collected(server: Server) -> None:
    server.post("/v1/completions", prompt="Hello", max_tokens=2, n=GROUP)
    for seed in (1, 2):
        for at, trajectory in enumerate(collected(server, seed=seed)["trajectory_ids"]):
            server.post("/v1/training/feedback", trajectory_id=trajectory, score=float(at % 2))
    status = waited_for(server, 1)
    assert status["trajectories_collected"] == 2 * GROUP
    assert status["reward_mean"] == 0.5
    missing = server.http.post("/v1/training/feedback", json={"trajectory_id": "traj-none", "score": 1.0})
    assert missing.status_code == 404


def test_a_scorer_that_fails_costs_its_group_and_nothing_else(server: Server) -> None:
    collected(server, scoring_function="regex", metadata={"pattern": HANGS})
    while not server.get("/v1/training/status")["drops"]:
        time.sleep(0.02)
    assert server.get("/v1/training/status")["drops"] == {"scoring_failed": GROUP}
    assert update(server)["status"] == "published"


def test_a_server_that_only_trains_refuses_requests_and_takes_updates(model: Path, tmp_path: Path) -> None:
    with in_thread(*flags(model, tmp_path, "--mode", "training_only")) as server:
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "inference_disabled")
        assert update(server)["status"] == "published"
        assert json.loads((tmp_path / "checkpoints/default/checkpoint-1/manifest.json").read_text())["step"] == 1
