"""Training on a tiny model: through a kill -9, over HTTP, and without inference."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from main_job.serving import Server, in_thread, start, stop
from tiny import save_tiny

pytestmark = pytest.mark.ci

STEPS = 4
FLAGS = ("--enable-rl-training", "--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "0.01")
GROUP = 4
HANGS = f"(?s)(?:{'|'.join('.' * 60)})*(?!)"
"""A pattern that tries 60 to the power of the text's length ways, and matches none."""
KILLED_AFTER_S = (0.02, 0.1)


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


# ---- through a crash ---------------------------------------------------------------------------


def batch(step: int) -> list[dict[str, Any]]:
    """The trajectories of update `step`, the same in every run."""
    dice = random.Random(step)
    return [
        {
            "prompt_token_ids": [5 + group, 6, 7],
            "completion_token_ids": [dice.randrange(10, 250) for _ in range(dice.randrange(2, 6))],
            "reward": dice.random(),
            "group_id": str(group),
        }
        for group in range(2)
        for _ in range(GROUP)
    ]


def update(server: Server, step: int) -> Any:
    return server.post("/v1/training/update", trajectories=batch(step))


def steps_made(server: Server) -> int:
    return int(server.get("/v1/training/status")["step"])


def checkpoint(folder: Path, step: int) -> dict[str, bytes]:
    """What decides about the next update: factors and the optimizer's state."""
    path = folder / "checkpoints" / "default" / f"checkpoint-{step}"
    return {name: (path / name).read_bytes() for name in ("adapters.safetensors", "optimizer.safetensors")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_server_goes_on_from_its_last_checkpoint_and_makes_the_same_updates(
    model: Path, tmp_path: Path
) -> None:
    control, killed = tmp_path / "control", tmp_path / "killed"
    control.mkdir()
    killed.mkdir()
    server = start(*flags(model, control))
    for step in range(1, STEPS + 1):
        assert update(server, step)["step"] == step
    stop(server)
    for delay in KILLED_AFTER_S:
        server = start(*flags(model, killed))
        done = steps_made(server)
        if done < STEPS:
            _kill_during(server, done + 1, delay)
        else:
            stop(server)
    server = start(*flags(model, killed))
    for step in range(steps_made(server) + 1, STEPS + 1):
        assert update(server, step)["step"] == step
    live = server.get("/v1/training/status")["current_lora"]
    assert live == f"default@{STEPS}" or int(live.partition("@")[2]) >= STEPS
    stop(server)
    assert checkpoint(killed, STEPS) == checkpoint(control, STEPS), "to the bit"


def _kill_during(server: Server, step: int, delay: float) -> None:
    """kill -9, so long after an update was asked for."""

    def ask() -> None:
        with suppress(httpx.HTTPError, AssertionError):  # it is killed while it answers
            update(server, step)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(delay)
    server.process.kill()
    server.process.wait()
    asking.join()


# ---- over HTTP ---------------------------------------------------------------------------------


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
    assert update(server, 1)["status"] == "published"


def test_a_server_that_only_trains_refuses_requests_and_takes_updates(model: Path, tmp_path: Path) -> None:
    with in_thread(*flags(model, tmp_path, "--mode", "training_only")) as server:
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "inference_disabled")
        assert update(server, 1)["status"] == "published"
        assert json.loads((tmp_path / "checkpoints/default/checkpoint-1/manifest.json").read_text())["step"] == 1
