"""A server that draws rollouts of its environment by itself, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import LORA, RL, free_port, serving
from tiny import save_tiny

from mlx_parallm import RLIntegratedServer
from mlx_parallm.errors import ConfigError

pytestmark = pytest.mark.ci

SOURCE = """
import asyncio, itertools

from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task


def task(text):
    return Task(({"role": "user", "content": text},), CollectionSpec())


class Turns:
    "Two turns; the reward depends on what was drawn."

    def tasks(self, seed):
        return (task(f"task {number}") for number in itertools.count())

    async def rollout(self, client, task):
        first = await client.ask(task.messages)
        await client.ask([*task.messages, first.message, {"role": "user", "content": "and?"}])
        return float(sum(first.token_ids) % 7)


class Levels(Turns):
    "One level is always solved, the other never or always."
    def tasks(self, seed):
        return (Task(({"role": "user", "content": f"{n}"},), CollectionSpec(), ("sure", "open")[n % 2])
                for n in itertools.count())

    async def rollout(self, client, task):
        answer = await client.ask(task.messages)
        return 1.0 if task.level == "sure" else float(sum(answer.token_ids) % 2)


class Few(Turns):
    def tasks(self, seed):
        return (task(f"task {number}") for number in range(2))


class Broken(Turns):
    async def rollout(self, client, task):
        raise RuntimeError("no network")


class Hangs(Turns):
    async def rollout(self, client, task):
        await client.ask(task.messages)
        await asyncio.to_thread(lambda: __import__("threading").Event().wait())
"""


def make(folder: Path, name: str = "own.py:Turns", **keys: Any) -> RLIntegratedServer:
    if not (folder / "model").exists():
        save_tiny("llama", folder / "model")
        (folder / "own.py").write_text(SOURCE)
    return RLIntegratedServer(
        folder / "model",
        LORA,
        RL,
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=folder / "checkpoints",
        rl_training__environment=str(folder / name) if ".py" in name else name,
        rl_training__rollout_group_size=2,
        rl_training__max_completion_tokens=6,
        rl_training__trajectory_log=folder / "log.jsonl",
        **keys,
    )


async def status_when(client: httpx.AsyncClient, true) -> dict[str, Any]:
    while not true(status := (await client.get("/v1/training/status")).json()):
        await asyncio.sleep(0.05)
    return status


def nothing_is_drawn(status: dict[str, Any]) -> bool:
    own = status["rollouts"]
    return own["groups_drawn"] + own["tasks_failed"] == own["tasks_taken"]


async def answers(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert answer.status_code == 200


def tasks_in(log: Path) -> set[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["group_id"] for line in lines}


@pytest.mark.timeout(240)
async def test_it_collects_and_learns_while_it_answers_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    server = make(tmp_path)
    async with serving(server) as client:
        await answers(client)
        status = await status_when(client, lambda status: status["updates_total"] >= 2)
        own = status["rollouts"]
        assert (own["tasks_failed"], own["last_failure"]) == (0, "")
        assert own["tasks_taken"] >= own["groups_drawn"] >= 4
        assert status["turns"]["continued"] == status["turns"]["first"] >= 8
        assert "apart" not in status["turns"]
        metrics = (await client.get("/metrics")).text
        assert 'mlx_parallm_rl_rollouts_total{adapter="default",reason="drawn"}' in metrics
        await client.post("/v1/training/pause", json={})
        await status_when(
            client, lambda status: status["rollouts"]["state"] == "paused" and status["state"] == "paused"
        )
        taken = (await status_when(client, nothing_is_drawn))["rollouts"]["tasks_taken"]
        await answers(client)
        await asyncio.sleep(0.3)
        assert (await client.get("/v1/training/status")).json()["rollouts"]["tasks_taken"] == taken
        await client.post("/v1/training/resume", json={})
        await status_when(client, lambda status: status["rollouts"]["tasks_taken"] > taken)
    assert server._engine._served is not None
    before = tasks_in(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").unlink()
    async with serving(make(tmp_path, checkpointing__resume=True)) as client:
        status = await status_when(client, lambda status: status["rollouts"]["groups_drawn"] >= 4)
        assert status["rollouts"]["tasks_taken"] >= len(before) + 4
        numbers = [int(group.rpartition("-")[2]) for group in before]
        cards = (await client.get("/debug/trajectories")).json()["data"]
        drawn = {card["group_id"] for card in cards if card["turn"] == 0}
        new = [int(group.rpartition("-")[2]) for group in drawn - before]
        assert min(new) > max(numbers), "no task is answered twice"


@pytest.mark.timeout(240)
async def test_a_curriculum_goes_on_after_a_restart(tmp_path: Path) -> None:
    """From the last update: by then, the level that is always solved is known."""
    async with serving(make(tmp_path, "own.py:Levels", rl_training__curriculum__enabled=True)) as client:
        await status_when(client, lambda status: level_of(status, "sure")["drawn"] >= 8)
        updates = (await client.get("/v1/training/status")).json()["updates_total"]
        await status_when(client, lambda status: status["updates_total"] >= updates + 2)
    before = tasks_in(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").unlink()
    keys = {"rl_training__curriculum__enabled": True, "checkpointing__resume": True}
    async with serving(make(tmp_path, "own.py:Levels", **keys)) as client:
        status = (await client.get("/v1/training/status")).json()
        assert level_of(status, "sure")["success"] > 0.75, "without what was learnt it would be 0.5"
        levels = status["rollouts"]["levels"]
        assert sum(level["drawn"] for level in levels) == status["rollouts"]["tasks_taken"] >= len(before)
        assert level_of(status, "open")["share"] > level_of(status, "sure")["share"]
        await status_when(client, lambda now: now["updates_total"] > status["updates_total"])
        await status_when(client, lambda now: now["rollouts"]["groups_drawn"] >= 1)  # the update may be of older ones
    numbers = [int(group.rpartition("-")[2]) for group in before]
    new = [int(group.rpartition("-")[2]) for group in tasks_in(tmp_path / "log.jsonl") - before]
    assert max(new) > max(numbers)


def level_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    levels = {level["level"]: level for level in status["rollouts"]["levels"]}
    return levels.get(name, {"drawn": 0, "success": 0.0})


@pytest.mark.timeout(120)
async def test_without_it_the_server_waits_for_requests(tmp_path: Path) -> None:
    async with serving(make(tmp_path, rl_training__server_rollouts=False)) as client:
        await answers(client)
        status = (await client.get("/v1/training/status")).json()
        assert (status["rollouts"], status["trajectories_collected"]) == (None, 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "state", "message"),
    [("own.py:Broken", "drawing", "no network"), ("own.py:Few", "failed", "no more tasks")],
)
async def test_a_server_goes_on_without_its_environment(tmp_path: Path, name: str, state: str, message: str) -> None:
    async with serving(make(tmp_path, name, rl_training__update_frequency=100)) as client:
        status = await status_when(client, lambda status: message in status["rollouts"]["last_failure"])
        assert status["rollouts"]["state"] == state
        await answers(client)
        taken = (await client.get("/v1/training/status")).json()["rollouts"]["tasks_taken"]
        assert taken < 40, "failures are not tried again and again"


@pytest.mark.timeout(120)
async def test_an_environment_that_hangs_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    server = make(tmp_path, "own.py:Hangs")
    async with serving(server) as client:
        await status_when(client, lambda status: status["rollouts"]["tasks_taken"] > 0)
        await answers(client)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    while server._engine.processor.stats().alive:
        await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
async def test_while_it_sleeps_nothing_is_drawn(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        await status_when(client, lambda status: status["rollouts"]["groups_drawn"] > 0)
        assert (await client.post("/sleep")).status_code == 200
        await status_when(client, lambda status: status["rollouts"]["state"] == "paused")
        assert (await client.post("/wake_up")).status_code == 200
        await status_when(client, lambda status: status["rollouts"]["state"] != "paused")


async def test_an_environment_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "own.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match=r"environment: .*own.py:1: ModuleNotFoundError"):
        await asyncio.gather((server := make(tmp_path)).run_inference(port=free_port()), server.run_training_loop())
