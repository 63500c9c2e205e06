"""Split mode: `mlx_parallm_train` samples on another server, and trains here. The servers are real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from main_job.serving import free_port, in_thread, start
from safetensors.numpy import load_file
from tiny import save_tiny
from training_runs import View, config

from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.errors import ConfigError, TrainingFailedError

pytestmark = pytest.mark.ci

REWARD = """
def score(completion):
    return sum(letter < "P" for letter in completion) / max(len(completion), 1)
"""
STEPS, GROUP, PROMPTS = 3, 4, 2


def options(folder: Path) -> TrainOptions:
    (folder / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"task {number}"}) for number in range(STEPS * PROMPTS)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return TrainOptions(str(folder / "tasks.jsonl"), STEPS, GROUP, PROMPTS)


def trained(folder: Path, name: str, **keys: Any) -> tuple[View, list[dict[str, Any]], Mapping[str, np.ndarray]]:
    """What a run shows, its trajectories by the number of the task, and the weights that it ends with."""
    view, asked = View(), options(folder)
    keys = {
        "checkpointing__checkpoint_dir": folder / name,
        "rl_training__trajectory_log": folder / f"{name}.jsonl",
        "rl_training__environment": asked.environment,
        "rl_training__reward": f"{folder}/rewards.py:score",
        **keys,
    }
    assert run(config(folder, "grpo", **keys), asked, view) == 0
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    records.sort(key=lambda record: record["trajectory_id"].split("-", 3)[3])
    newest = (folder / name / "default" / "latest").read_text().strip()
    return view, records, load_file(folder / name / "default" / newest / "adapters.safetensors")


@pytest.mark.timeout(240)
def test_split_mode_and_shared_mode_make_the_same_updates_from_the_same_samples(tmp_path: Path) -> None:
    """The server is this project's own, which draws the same samples from the same seeds and weights."""
    save_tiny("llama", tmp_path / "model")
    shared, there, weights = trained(tmp_path, "shared")
    sent = tmp_path / "sent"
    flags = ("--model-path", str(tmp_path / "model"), "--kv-cache-memory", "16MB", "--allowed-adapter-roots", str(sent))
    with in_thread(*flags) as server:
        keys = {"inference__engine": "openai", "inference__url": server.url, "inference__adapter_dir": sent}
        split, here, split_weights = trained(tmp_path, "split", **keys)
        left = [model["id"] for model in server.get("/v1/models")["data"]]
    assert [name for name in left if name.startswith(("default-", "neutral-"))] == [], "nothing is left in the server"
    assert not sent.exists()
    assert split.facts["samples"] == f"from openai at {server.url}"
    assert [report.status for report in split.reports] == ["published"] * STEPS
    assert len(there) == len(here) == STEPS * PROMPTS * GROUP
    for ours, theirs in zip(there, here, strict=True):
        for field in ("prompt_token_ids", "completion_token_ids", "text", "finish_reason", "adapter", "reward"):
            assert theirs[field] == ours[field], field
        np.testing.assert_allclose(theirs["sampling_logprobs"], ours["sampling_logprobs"], atol=1e-5)
    assert {record["adapter"] for record in here} == {"base@0", "default@1", "default@2"}
    for name, leaf in weights.items():
        np.testing.assert_allclose(split_weights[name], leaf, atol=1e-5)
    for ours, theirs in zip(shared.reports, split.reports, strict=True):
        assert theirs.metrics["loss"] == pytest.approx(ours.metrics["loss"], abs=1e-5)


@contextmanager
def mlx_server(model: Path) -> Iterator[str]:
    """mlx_lm.server on a model; its address."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "mlx_lm.server has ended"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(240)
def test_samples_of_mlx_lm_server_have_the_logprobs_of_the_weights_that_were_sent(tmp_path: Path) -> None:
    """It takes each version from the folder that a request names: the trainer finds the same logprobs again."""
    save_tiny("llama", tmp_path / "model")
    with mlx_server(tmp_path / "model") as url:
        keys = {"inference__engine": "mlx", "inference__url": url, "rl_training__optimizer__learning_rate": 1e-2}
        view, records, _ = trained(tmp_path, "split", **keys)
        assert [report.status for report in view.reports] == ["published"] * STEPS
        for report in view.reports:
            assert report.metrics["mismatch_kl"] < 1e-6
        assert {record["finish_reason"] for record in records} <= {"stop", "length"}
        assert not (tmp_path / "split" / ".inference").exists()
        save_tiny("llama", tmp_path / "model2", seed=1)
        keys["inference__model"] = str(tmp_path / "model")
        with pytest.raises(ConfigError, match="serve the same base model"):
            trained(tmp_path, "other", **keys, model__base_model_path=str(tmp_path / "model2"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_dies_ends_the_run_and_the_updates_so_far_are_saved(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    server = start("--model-path", str(tmp_path / "model"), "--allowed-adapter-roots", str(tmp_path))
    asked = options(tmp_path)
    view = View(then=lambda view: server.process.kill())
    keys = {
        **{"inference__engine": "openai", "inference__url": server.url, "inference__adapter_dir": tmp_path / "sent"},
        **{"rl_training__reward": f"{tmp_path}/rewards.py:score", "checkpointing__checkpoint_dir": tmp_path / "run"},
    }
    with pytest.raises(TrainingFailedError, match=r"the openai engine at .* cannot be reached"):
        run(config(tmp_path, "grpo", rl_training__environment=asked.environment, **keys), asked, view)
    server.http.close()
    server.process.wait()
    assert [report.status for report in view.reports][:1] == ["published"]
    assert "checkpoint-1" in (tmp_path / "run" / "default" / "latest").read_text()
    assert not (tmp_path / "sent").exists()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"inference__engine": "none"}, "none samples nothing, and this run asks for some"),
        (
            {"inference__engine": "vllm", "inference__url": "http://a", "rl_training__rollout_temperature": 0.8},
            "samples of temperature 0.8; sample with --temperature 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()  # loading it would fail
    asked = options(tmp_path)
    keys["rl_training__reward"] = f"{tmp_path}/rewards.py:score"
    with pytest.raises(ConfigError, match=reason):
        run(config(tmp_path, "grpo", rl_training__environment=asked.environment, **keys), asked, View())
