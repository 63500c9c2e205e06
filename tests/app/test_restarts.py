"""What a restart keeps: numbers of versions, what is live, and what is in training. What a deletion leaves: nothing."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import LORA, RL
from app.test_server import serving as client_of
from lora import layout_of, random_adapter
from server.asking import post
from tiny import save_tiny, tiny_model

from mlx_parallm import RLIntegratedServer
from mlx_parallm.adapters.formats import write_mlx_lm

LOAD, ROLLBACK, DELETE = "/v1/load_lora_adapter", "/v1/adapters/rollback", "/v1/adapters/delete"
LAYOUT = layout_of(tiny_model("llama"))
PROMPT = {"prompt": [72, 101, 108, 108, 111], "max_tokens": 1, "echo": True, "logprobs": 0}

pytestmark = [pytest.mark.ci, pytest.mark.timeout(240)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "model")
    write(tmp_path, 1)
    return tmp_path


def write(folder: Path, seed: int, name: str = "adapters/tone") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    write_mlx_lm(folder / name, random_adapter(LAYOUT, seed, size=2.0), LAYOUT)


def serving(folder: Path, trains: bool = False, kept: bool = True, **keys: Any):
    where = {"checkpointing__checkpoint_dir": folder / "run"} if kept else {}
    dirs = {"adapters__adapter_dir": folder / "adapters", "server__kv_cache_memory": "16MB"}
    server = RLIntegratedServer(folder / "model", LORA, RL, **{"rl_training__enabled": trains, **dirs, **where, **keys})
    return client_of(server)


async def said(client: httpx.AsyncClient, model: str = "tone") -> tuple[str, list[float]]:
    """The version that answers, and what it thinks of a text, which no two adapters think alike of."""
    answer = await post(client, "/v1/completions", model=model, **PROMPT)
    return answer["lora_adapter"], answer["choices"][0]["logprobs"]["token_logprobs"][1:5]


async def load(client: httpx.AsyncClient, path: Path, name: str = "tone") -> str:
    return (await post(client, LOAD, lora_name=name, lora_path=str(path), load_inplace=True))["lora_adapter"]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    text = "\n".join(record.getMessage() for record in caplog.records)
    caplog.clear()
    return text


# ---- numbers and what is live ---------------------------------------------------------------------


async def test_a_rollback_and_the_numbers_outlive_the_server(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(folder) as client:
        first = await said(client)
        write(folder, 2)
        assert await load(client, folder / "adapters" / "tone") == "tone@2"
        second = await said(client)
        assert (first[0], second[0], first[1] == second[1]) == ("tone@1", "tone@2", False)
        assert (await post(client, ROLLBACK, lora_name="tone"))["lora_adapter"] == "tone@1"
    caplog.clear()
    for _ in range(2):
        async with serving(folder) as client:
            assert "tone: live tone@1, as before the restart; its folder has tone@2" in logged(caplog)
            assert await said(client) == first
            assert await said(client, "tone@2") == second
            refused = await client.post(ROLLBACK, json={"lora_name": "tone"})
            assert refused.status_code == 409, "the version that was rolled back is not the one before"
    write(folder, 3)
    async with serving(folder) as client:
        assert "tone: its folder has new files, which are tone@3" in logged(caplog)
        third = await said(client)
        assert third[0] == "tone@3"
        assert third[1] not in (first[1], second[1])
    write(folder, 1)
    async with serving(folder) as client:
        assert await said(client) == first, "the same files have the number that they had"
        write(folder, 4)
        assert await load(client, folder / "adapters" / "tone") == "tone@4"


async def test_a_replaced_version_can_be_rolled_back_to_after_a_restart(folder: Path) -> None:
    async with serving(folder) as client:
        first = await said(client)
        write(folder, 2)
        await load(client, folder / "adapters" / "tone")
        assert (folder / "run" / "tone" / "version-1").is_dir()
    async with serving(folder) as client:
        assert (await said(client))[0] == "tone@2"
        await post(client, ROLLBACK, lora_name="tone")
        assert await said(client) == first
        write(folder, 3)
        write(folder, 4, "adapters/other")
        assert await load(client, folder / "adapters" / "tone") == "tone@3"
        assert await load(client, folder / "adapters" / "other") == "tone@4"
        copies = {path.name for path in (folder / "run" / "tone").glob("version-*")}
        assert "version-4" in copies, "its folder is not the one that a start finds"
        fourth = await said(client)
    async with serving(folder) as client:
        assert await said(client) == fourth, "it came from another folder"
        assert (await post(client, ROLLBACK, lora_name="tone"))["lora_adapter"] == "tone@3"


async def test_a_load_over_a_checkpoint_outlives_the_server_until_there_is_a_newer_one(folder: Path) -> None:
    async with serving(folder) as client:
        await post(client, "/v1/training/checkpoint", lora_name="tone")
        write(folder, 2)
        await load(client, folder / "adapters" / "tone")
        second = await said(client)
    async with serving(folder) as client:
        assert await said(client) == second
        await post(client, ROLLBACK, lora_name="tone")
    async with serving(folder) as client:
        assert (await said(client))[0] == "tone@1"
        assert await load(client, folder / "adapters" / "tone") == "tone@2"
        await post(client, ROLLBACK, lora_name="tone")
        await post(client, "/v1/training/checkpoint", lora_name="tone@2")
    async with serving(folder) as client:
        assert await said(client) == second, "the latest checkpoint is newer than the rollback"


async def test_numbers_that_a_client_gives_are_used_once_too(folder: Path) -> None:
    async with serving(folder) as client:
        assert await load(client, folder / "adapters" / "tone", "steps@3") == "steps@3"
    async with serving(folder) as client:
        assert await load(client, folder / "adapters" / "tone", "steps@3") == "steps@3"
        write(folder, 2)
        body = {"lora_name": "steps@3", "lora_path": str(folder / "adapters" / "tone"), "load_inplace": True}
        assert (await client.post(LOAD, json=body)).status_code == 409
    async with serving(folder) as client:
        refused = await client.post(LOAD, json=body)
        assert (refused.status_code, "steps@4" in refused.text) == (409, True)


async def test_without_a_checkpoint_folder_a_rollback_warns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(folder, kept=False) as client:
        await said(client)
        write(folder, 2)
        await load(client, folder / "adapters" / "tone")
        logged(caplog)
        await post(client, ROLLBACK, lora_name="tone")
        assert "tone@1 is live until the server ends: a restart serves tone@2. With --checkpoint-dir" in logged(caplog)


# ---- training -------------------------------------------------------------------------------------


GIVEN = [{"prompt_token_ids": [5, 6], "completion_token_ids": [8 + n, 2], "reward": n, "group_id": "a"} for n in (0, 1)]


async def update(client: httpx.AsyncClient, adapter: str) -> str:
    answer = await post(client, "/v1/training/update", lora_adapter=adapter, trajectories=GIVEN)
    assert answer["status"] == "published", answer
    return str(answer["lora_adapter"])


async def test_what_was_in_training_is_again_until_it_is_stopped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(folder, trains=True) as client:
        for name in ("globex", "acme"):
            await post(client, "/v1/training/start", lora_adapter=name)
        assert await update(client, "globex") == "globex@2"
        stopped = await post(client, "/v1/training/stop", lora_adapter="acme")
        assert stopped["state"] == "stopped"
        assert (await client.get("/v1/training/status?lora_adapter=acme")).status_code == 404
        assert (await said(client, "acme"))[0] == "acme@1", "it is served as before"
        refused = await client.post("/v1/training/stop", json={})
        assert (refused.status_code, "default adapter" in refused.text) == (409, True)
    assert "globex@2 is saved in" in logged(caplog)
    async with serving(folder, trains=True) as client:
        text = logged(caplog)
        assert "globex is in training again, as before the restart" in text
        assert "acme is in training" not in text
        trained = (await client.get("/v1/training/status")).json()["trained_adapters"]
        assert trained == ["default", "globex"]
        assert await update(client, "globex") == "globex@3"
        await post(client, "/v1/training/stop", lora_adapter="globex")
        again = await post(client, "/v1/training/start", lora_adapter="globex")
        assert (again["live_lora"], again["step"]) == ("globex@3", 2), "it goes on where it was"
        await post(client, "/v1/training/stop", lora_adapter="globex")
    async with serving(folder, trains=True) as client:
        assert (await client.get("/v1/training/status")).json()["trained_adapters"] == ["default"]
        assert (await said(client, "globex"))[0] == "globex@3"


async def test_an_adapter_in_training_is_neither_unloaded_nor_rolled_back_here(folder: Path) -> None:
    async with serving(folder, trains=True) as client:
        await post(client, "/v1/training/start", lora_adapter="globex")
        await update(client, "globex")
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter", ROLLBACK):
            refused = await client.post(path, json={"lora_name": "globex"})
            assert refused.status_code == 409, refused.text
            assert "'globex' is in training here" in refused.text
        refused = await client.delete("/v1/adapters/globex")
        assert (refused.status_code, "POST /v1/training/stop" in refused.text) == (409, True)
        assert (await said(client, "globex"))[0] == "globex@2"
        await post(client, "/v1/training/stop", lora_adapter="globex")
        assert (await post(client, "/v1/unload_lora_adapter", lora_name="globex"))["unloaded"][-1] == "globex@2"


async def test_a_version_that_a_rollback_has_left_keeps_its_number(folder: Path) -> None:
    """No checkpoint has it, so only the journal knows of it."""
    async with serving(folder, trains=True) as client:
        await post(client, "/v1/training/checkpoint", checkpoint_name="start")
        numbers = [await update(client, "default") for _ in range(2)]
        await post(client, "/v1/training/rollback", to="start")
    async with serving(folder, trains=True) as client:
        again = await update(client, "default")
        assert again not in numbers
        assert int(again.partition("@")[2]) > int(numbers[-1].partition("@")[2])


# ---- deletion -------------------------------------------------------------------------------------


async def test_a_deleted_adapter_leaves_nothing(folder: Path) -> None:
    log = folder / "trajectories.jsonl"
    keys = {"rl_training__trajectory_log": log}
    run = folder / "run"
    collected = {"prompt": "zebra", "n": 2, "max_tokens": 4, "collect_trajectory": True}
    async with serving(folder, trains=True, **keys) as client:
        for name in ("globex", "acme"):
            await post(client, "/v1/training/start", lora_adapter=name)
            await update(client, name)
            await post(client, "/v1/training/checkpoint", lora_name=name)
            answer = await post(client, "/v1/completions", model=name, **collected)
            for choice in answer["trajectory_ids"]:
                await post(client, "/v1/training/feedback", trajectory_id=choice, score=1)
        lesson = {"prompts": ["abc"], "reward": {"word": "zzz"}, "lora_adapter": "globex"}
        await post(client, "/v1/training/lesson", **lesson)
        look = await post(client, DELETE, lora_name="globex", dry_run=True)
        assert (look["deleted"], look["in_training"]) == (False, True)
        found = {part["what"]: part["count"] for part in look["parts"]}
        assert found["versions that are loaded"] >= 2
        assert found["updates and other changes of its training"] >= 1
        assert found["collected trajectories"] >= 2
        assert found["lesson"] == 1
        assert found["files of checkpoints and versions"] >= 3
        refused = await client.post(DELETE, json={"lora_name": "globex"})
        assert (refused.status_code, "POST /v1/training/stop" in refused.text) == (409, True)
        assert (run / "globex").is_dir()
        gone = await post(client, DELETE, lora_name="globex", stop_training=True)
        assert (gone["deleted"], gone["in_training"]) == (True, False)
        assert (await client.get("/v1/adapters/globex")).status_code == 404
        assert not (run / "globex").exists()
        listed = (await client.get("/v1/training/trajectories")).json()
        assert "globex" not in json.dumps(listed)
        assert (await client.get("/v1/training/lesson")).json()["lesson"] is None
        assert (await client.post(DELETE, json={"lora_name": "globex", "dry_run": True})).status_code == 404
        assert (await said(client, "acme"))[0].startswith("acme@")
    assert not (run / "lesson.json").exists()
    for path in (run / "metrics.jsonl", log, run / "journal.sqlite"):
        assert b"globex" not in path.read_bytes(), path
    with sqlite3.connect(run / "journal.sqlite") as journal:
        assert journal.execute("SELECT count(*) FROM changes WHERE adapter = 'acme'").fetchone()[0] > 0
    async with serving(folder, trains=True, **keys) as client:
        assert (await client.get("/v1/adapters/globex")).status_code == 404
        assert (await said(client, "acme"))[0].startswith("acme@")
        assert (await client.get("/v1/training/status")).json()["trained_adapters"] == ["default", "acme"]


async def test_a_folder_adapter_is_deleted_with_its_folder_on_a_server_that_only_serves(folder: Path) -> None:
    write(folder, 2, "adapters/other")
    async with serving(folder) as client:
        await post(client, "/v1/training/checkpoint", lora_name="tone")
        await post(client, "/v1/adapters/route", weights={"tone": 1})
        assert (await client.post(DELETE, json={"lora_name": "tone"})).status_code == 409, "the route uses it"
        assert (folder / "adapters" / "tone").is_dir()
        await post(client, "/v1/adapters/route", weights={"base": 1})
        gone = await post(client, DELETE, lora_name="tone")
        paths = {part["path"] for part in gone["parts"]}
        assert paths == {"", str(folder / "run" / "tone"), str(folder / "adapters" / "tone")}
        for name in ("nobody", "../tone"):
            assert (await client.post(DELETE, json={"lora_name": name})).status_code in (400, 404)
    assert not (folder / "adapters" / "tone").exists()
    async with serving(folder) as client:
        assert [card["id"] for card in (await client.get("/v1/adapters")).json()["data"]] == ["other@1"]


async def test_training_continues_from_an_adapter_from_anywhere_though_its_folder_is_gone(folder: Path) -> None:
    write(folder, 7, "elsewhere/own")
    anywhere = {"adapters__allowed_adapter_roots": (folder / "elsewhere",)}
    async with serving(folder, trains=True, **anywhere) as client:
        await load(client, folder / "elsewhere" / "own", "own")
        await post(client, "/v1/training/start", lora_adapter="own")
        before = await said(client, "own")
    shutil.rmtree(folder / "elsewhere" / "own")
    async with serving(folder, trains=True, **anywhere) as client:
        assert await said(client, "own") == before
        assert "own" in [each["lora_adapter"] for each in (await client.get("/debug/training")).json()["adapters"]]
