"""Atropos' groups train a tiny model: through a trajectory API of their own, and through ours; a kill loses nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import LORA, serving
from run_api import RunApi, scored
from tiny import save_tiny
from training_runs import View, config

from mlx_parallm import RLIntegratedServer
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.config import RLConfig
from mlx_parallm.errors import ConfigError

pytestmark = pytest.mark.timeout(120)


def group(number: int, **fields: Any) -> dict[str, Any]:
    """Two sequences with a tool result between their drawn tokens; the second is better."""
    first, second = [40, 41, 42, 50 + number, 60, 70], [40, 41, 43, 50 + number, 61, 70]
    return scored(
        tokens=[first, second],
        masks=[[-100, -100, 42, -100, 60, -100], [-100, -100, 43, -100, 61, -100]],
        scores=[0.0, 1.0],
        inference_logprobs=[[1.0, 1.0, -5.0, 1.0, -5.0, 1.0]] * 2,
        **fields,
    )


@pytest.fixture
def api() -> Iterator[RunApi]:
    one = RunApi()
    yield one
    one.stop()


def server(tmp_path: Path, **keys: Any) -> RLIntegratedServer:
    if not (tmp_path / "model").exists():
        save_tiny("llama", tmp_path / "model")
    return RLIntegratedServer(
        tmp_path / "model",
        LORA,
        RLConfig(learning_rate=1e-3, batch_size=4),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        **keys,
    )


async def updates(client: httpx.AsyncClient, wanted: int) -> dict[str, Any]:
    """The status after so many updates since start."""
    while (status := (await client.get("/v1/training/status")).json())["updates_total"] < wanted:
        await asyncio.sleep(0.05)
    return status


def test_the_train_command_makes_its_steps_on_batches(tmp_path: Path, api: RunApi) -> None:
    settings = config(
        tmp_path,
        "grpo",
        rl_training__atropos_url=api.url,
        rl_training__environment="gsm8k",
        server__log_level="warning",
    )
    api.batches = [[group(4 * batch + number) for number in range(4)] for batch in range(2)]
    view = View()
    assert run(settings, TrainOptions("gsm8k", 2, 2, 4), view) == 0
    assert [(report.step, report.status) for report in view.reports] == [(1, "published"), (2, "published")]
    assert [report.metrics["trajectories"] for report in view.reports] == [8.0, 8.0]
    assert view.reports[0].metrics["completion_tokens"] == 2.0, "tool results were not drawn"
    assert view.reports[-1].metrics["ratio_mean"] != 1.0, "the logprobs are the environment's"
    assert view.facts["environment"] == "gsm8k"
    (registered,) = api.registered
    assert (registered["batch_size"], registered["num_steps"], registered["starting_step"]) == (8, 2, 0)


def test_gsm8k_without_atropos_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gsm8k' is unknown.*needs --atropos-url"):
        run(config(tmp_path, "grpo"), TrainOptions("gsm8k", 2, 2, 4), View())


async def test_a_server_trains_on_batches_beside_what_it_collects(tmp_path: Path, api: RunApi) -> None:
    api.batches = [[group(1), group(2)]]
    async with serving(server(tmp_path, rl_training__atropos_url=api.url)) as client:
        status = await updates(client, 1)
        assert (status["trajectories_collected"], status["reward_mean"]) == (4, 0.5)
        shown: list[dict[str, object]] = [{"state": "training"}]
        while any(each["state"] == "training" for each in shown):  # the version is live a moment before they are done
            shown = (await client.get("/debug/trajectories")).json()["data"]
        assert {(each["lora_adapter"], each["finish_reason"], each["state"]) for each in shown} == {
            (None, None, "trained")
        }


async def test_environments_send_their_groups_to_the_server_itself(tmp_path: Path) -> None:
    async with serving(server(tmp_path, server__atropos_api=True)) as client:
        body = {"max_token_length": 64, "desired_name": "tiny", "weight": 1.0, "group_size": 2}
        env_id = (await client.post("/register-env", json=body)).json()["env_id"]
        for number in range(2):
            content = gzip.compress(json.dumps(group(number, env_id=env_id)).encode())
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            answer = await client.post("/scored_data", content=content, headers=headers)
            assert answer.json() == {"status": "received"}
        await updates(client, 1)
        status = await client.request("GET", "/status-env", json={"env_id": env_id})
        assert (status.json()["current_step"], status.json()["queue_size"]) == (1, 0)
        info = (await client.get("/info")).json()
        assert info["batch_size"] == 4
    async with serving(server(tmp_path, server__atropos_api=True)) as client:
        again = (await client.post("/register-env", json=body)).json()
        assert again["starting_step"] == 1
        assert again["env_id"] != env_id
        await client.post("/scored_data", json=group(1, env_id=again["env_id"]))
        shown = (await client.get("/debug/trajectories")).json()["data"]
        assert [each["scoring_function"] for each in shown] == ["atropos:tiny_0"] * 2
        assert [each["state"] for each in shown] == ["scored"] * 2
