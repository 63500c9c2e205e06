"""examples/first_sketch/: its program, its requests and its configuration, on a tiny model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tiny import save_tiny

from mlx_parallm.config import resolve
from mlx_parallm.rl.environments import answers_of

pytestmark = pytest.mark.ci

FOLDER = Path(__file__).parents[2] / "examples" / "first_sketch"
METRICS = (
    "rl_trajectories_collected",
    "rl_training_loss",
    "rl_updates_per_second",
    "lora_swaps_total",
    "checkpoint_saves_total",
)


@pytest.mark.timeout(180)
def test_its_program_answers_its_requests(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, str(FOLDER / "program.py"), str(tmp_path / "model"), str(port)], cwd=tmp_path
    )
    try:
        wait_for(url, server)
        done = subprocess.run([FOLDER / "requests.sh", url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        saved, answer, update, status, _, switched = map(json.loads, lines[:6])
        assert (saved["name"], saved["step"]) == ("checkpoint-0", 0)
        assert (answer["lora_adapter"], len(answer["trajectory_ids"])) == ("default@1", 2)
        assert answer.get("trajectory_warning", "") == ""
        assert (update["status"], update["checkpoint"]) == ("published", "checkpoint-1")
        assert status["current_lora"] == update["lora_adapter"] == switched["current_lora"]
        assert {"checkpoint-0", "checkpoint-1", "manual-update-1"} <= set(status["available_checkpoints"])
        assert [name for name in METRICS if f"mlx_parallm_{name}" not in "\n".join(lines[6:])] == []
    finally:
        server.terminate()
        server.wait(30)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the program ended")


def test_its_configuration_is_valid() -> None:
    config = resolve({}, {}, FOLDER / "server_config.yaml").config
    assert config.rl_training.enabled
    assert config.model.lora_target_modules == ("q_proj", "v_proj")
    assert config.rl_training.environment is not None
    assert len(answers_of(str(FOLDER.parents[1] / config.rl_training.environment)).rows) == 3
