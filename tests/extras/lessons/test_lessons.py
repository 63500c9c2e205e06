"""Lessons on a server of a tiny random model: they draw, learn, end and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import LORA, RL, serving
from tiny import save_tiny

from mlx_parallm import RLIntegratedServer

pytestmark = pytest.mark.ci

ROUTE = "/v1/training/lesson"
LESSON = {
    "prompts": ["abc", "def"],
    "reward": {"pattern": "[a-m]"},
    "max_tokens": 4,
    "group_size": 4,
    "temperature": 1,
    "learning_rate": 2e-3,
}
"""Random text has such a letter now and then."""


def make(folder: Path, **keys: Any) -> RLIntegratedServer:
    if not (folder / "model").exists():
        save_tiny("llama", folder / "model")
    run = folder / "run"
    keys = {"server__kv_cache_memory": "16MB", "checkpointing__checkpoint_dir": run, **keys}
    return RLIntegratedServer(folder / "model", LORA, RL, **keys)


async def lesson_when(client: httpx.AsyncClient, true) -> dict[str, Any]:
    while not true(lesson := (await client.get(ROUTE)).json()["lesson"]):
        await asyncio.sleep(0.05)
    return lesson


@pytest.mark.timeout(240)
async def test_it_learns_while_the_server_answers_and_is_stopped(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        begun = await client.post(ROUTE, json=LESSON)
        assert begun.status_code == 200, begun.text
        assert begun.json()["lesson"]["answers_per_update"] == 24
        again = await client.post(ROUTE, json=LESSON)
        assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
        lesson = await lesson_when(client, lambda lesson: lesson["updates"] >= 2)
        assert (await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})).status_code == 200
        assert lesson["points"][0]["update"] == 0
        assert sum(point["answers"] for point in lesson["points"]) >= 48
        assert all(len(prompt["before"]) == len(prompt["now"]) == 4 for prompt in lesson["prompts"])
        status = (await client.get("/v1/training/status")).json()
        assert status["metrics"]["learning_rate"] == pytest.approx(2e-3), "not the configured 1e-3"
        learnt_from = (await client.get("/v1/training/report")).json()["keys"]
        assert [(each["whose"], each["key"]) for each in learnt_from] == [("key", "anyone")], "it is of who gave it"
        stopped = (await client.delete(ROUTE)).json()["lesson"]
        assert (stopped["state"], stopped["outcome"]) == ("ended", "stopped")
        assert stopped["live_lora"].startswith("default@")
        assert (await client.delete(ROUTE)).status_code == 409
        await asyncio.sleep(0.5)
        after = (await client.get("/v1/training/status")).json()
        assert (after["groups_ready"], after["trajectories_waiting"]) == (0, 0), "nothing of it is left to train on"
        undone = await client.post("/v1/training/rollback", json={"to": stopped["checkpoint"]})
        assert undone.status_code == 200
        assert undone.json()["step"] == 0
        another = {**LESSON, "lora_adapter": "other", "updates": 1}
        assert (await client.post(ROUTE, json=another)).json()["lesson"]["lora_adapter"] == "other"
        ended = await lesson_when(client, lambda lesson: lesson["state"] == "ended")
        assert (ended["outcome"], ended["updates"]) == ("finished", 1)


@pytest.mark.timeout(240)
async def test_it_pauses_and_ends_with_the_server_and_a_restart_shows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(make(tmp_path)) as client:
        assert (await client.post(ROUTE, json=LESSON)).status_code == 200
        await lesson_when(client, lambda lesson: lesson["updates"] >= 1)
        await client.post("/v1/training/pause", json={})
        paused = await lesson_when(client, lambda lesson: lesson["state"] == "paused")
        assert paused["reason"] == "asked"
        await client.post("/v1/training/resume", json={})
        await lesson_when(client, lambda lesson: lesson["state"] != "paused")
        assert (await client.post("/sleep")).status_code == 200
        await lesson_when(client, lambda lesson: lesson["state"] == "paused")
        assert (await client.post("/wake_up")).status_code == 200
        await lesson_when(client, lambda lesson: lesson["state"] != "paused")
    noted = json.loads((tmp_path / "run" / "lesson.json").read_text())
    assert noted["outcome"] == "interrupted"
    assert (
        f"the lesson of default was cut off after {noted['updates']} updates; what it has taught is kept" in caplog.text
    )
    assert re.search(r"default@\d+ is saved in .*/default/checkpoint-\d+", caplog.text)
    caplog.clear()
    async with serving(make(tmp_path)) as client:
        assert f"the last lesson, of default, was cut off after {noted['updates']} updates" in caplog.text
        lesson = (await client.get(ROUTE)).json()["lesson"]
        assert (lesson["outcome"], lesson["updates"]) == ("interrupted", noted["updates"])
        step = (await client.get("/v1/training/status")).json()["step"]
        assert step - noted["updates"] in (0, 1), "its updates are kept, and one that was under way may still be made"


@pytest.mark.timeout(120)
async def test_rules_without_a_signal_end_it_and_bad_ones_do_not_begin(tmp_path: Path) -> None:
    async with serving(make(tmp_path, rl_training__trajectory_buffer_size=100)) as client:
        bad = await client.post(ROUTE, json={**LESSON, "reward": {"pattern": "(a"}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "reward.pattern")
        many = await client.post(ROUTE, json={**LESSON, "prompts": ["a"] * 16, "group_size": 32})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "prompts")
        long = await client.post(ROUTE, json={**LESSON, "prompts": ["a" * 4000], "max_tokens": 512})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "prompts[0]")
        assert (await client.post(ROUTE, json={**LESSON, "reward": {"word": "please"}})).status_code == 200
        ended = await lesson_when(client, lambda lesson: lesson["state"] == "ended")
        assert (ended["outcome"], ended["updates"]) == ("no_signal", 0)
        assert "No answer has earned a reward" in ended["advice"]
        while (status := (await client.get("/v1/training/status")).json())["state"] == "running":
            await asyncio.sleep(0.05)  # until its last answers have left
        assert (status["state"], status["skips"]) == ("idle", {})
