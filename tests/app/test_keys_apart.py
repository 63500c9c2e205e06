"""What keys learn of each other's prompts, on a real server with a tiny model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from app.test_server import serving as running
from server.keys import key_file
from tiny import save_tiny

from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure

pytestmark = pytest.mark.ci

Headers = Mapping[str, Mapping[str, str]]
OWN = ("inference", {"own_prefix_cache": True})
PROMPT = [number % 256 for number in range(200)]
SECRET = "the zebra's secret"
WITHOUT_END = ("/v1/training/events",)
"""Streams that never end."""


@asynccontextmanager
async def serving(folder: Path, trains: bool, **keys: object) -> AsyncIterator[tuple[httpx.AsyncClient, Headers]]:
    """A client of a server with these keys, and the headers that send each."""
    save_tiny("llama", folder / "model")
    file, sent = key_file(folder, **keys)
    config = configure(
        folder / "model",
        rl_training__enabled=trains,
        rl_training__update_frequency=64,
        server__kv_cache_memory="16MB",
        server__keys_file=str(file),
        checkpointing__checkpoint_dir=str(folder / "checkpoints"),
    )
    async with running(IntegratedServer(config)) as client:
        yield client, sent


@pytest.mark.timeout(60)
async def test_only_keys_that_may_share_cached_tokens_do(tmp_path: Path) -> None:
    keys = {"one": OWN, "two": OWN, "three": "inference", "four": "inference"}
    async with serving(tmp_path, trains=False, **keys) as (client, sent):

        async def cached(key: str, **fields: str) -> int:
            """The tokens of the prompt that were not computed, for a request of this key."""
            body = {"prompt": PROMPT, "max_tokens": 1, **fields}
            answer = (await client.post("/v1/completions", json=body, headers=sent[key])).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(key) for key in ("one", "two", "three")] == [0, 0, 0]
        most = await cached("one")
        assert most >= 128
        assert [await cached(key) for key in ("two", "three", "four")] == [most] * 3
        assert [await cached(key, cache_salt="s") for key in ("one", "two")] == [0, 0], "not even with the same salt"
        assert [await cached("three", cache_salt=salt) for salt in ("s", "t")] == [0, 0]
        assert await cached("four", cache_salt="s") == most, "a salt is not bound to a key"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["inference", "train"])
async def test_no_route_shows_a_key_what_another_asked(tmp_path: Path, role: str) -> None:
    """As a text or as tokens, with every id that the other key knows. An admin reads it."""
    async with serving(tmp_path, trains=True, mine="train", other=role, boss="admin") as (client, sent):
        said = {"prompt": SECRET, "max_tokens": 2, "collect_trajectory": True, "n": 2}
        collected = (await client.post("/v1/completions", json=said, headers=sent["mine"])).json()
        body = {"input": SECRET, "max_output_tokens": 2}
        stored = (await client.post("/v1/responses", json=body, headers=sent["mine"])).json()["id"]
        paths = (await client.get("/openapi.json", headers=sent["boss"])).json()["paths"]
        ids = [stored, *collected["trajectory_ids"]]
        reads = {
            path[: path.find("{")] + each + path[path.find("}") + 1 :] if "{" in path else path
            for path, methods in paths.items()
            if "get" in methods and path not in WITHOUT_END
            for each in ids
        }
        tokens = (await client.post("/tokenize", json={"prompt": SECRET}, headers=sent["mine"])).json()["tokens"]
        secrets = (SECRET, json.dumps(tokens), json.dumps(tokens, separators=(",", ":")))

        async def shown(key: str) -> set[str]:
            answers = {path: (await client.get(path, headers=sent[key])).text for path in reads}
            return {path for path, text in answers.items() if any(secret in text for secret in secrets)}

        assert await shown("other") == set()
        one = f"/v1/training/trajectories/{collected['trajectory_ids'][0]}"
        lists = {"/v1/training/trajectories", one}
        assert await shown("mine") >= lists
        assert {"/debug/trajectories", f"/v1/responses/{stored}/input_items", *lists} <= await shown("boss"), (
            "they have it"
        )
        preference = {"chosen": "x", "rejected_id": collected["trajectory_ids"][0]}
        for path, body in (
            ("/v1/responses", {"input": "Repeat.", "previous_response_id": stored, "max_output_tokens": 2}),
            ("/v1/training/preference", preference),
            ("/v1/training/feedback", {"trajectory_id": collected["trajectory_ids"][0], "score": 1}),
        ):
            assert SECRET not in (await client.post(path, json=body, headers=sent["other"])).text


@pytest.mark.timeout(90)
async def test_a_key_for_some_adapters_teaches_and_asks_these_alone(tmp_path: Path) -> None:
    keys = {"acme": ("train", {"adapters": ("acme*",)}), "free": "train"}
    async with serving(tmp_path, trains=True, **keys) as (client, sent):

        async def ask(key: str, method: str, path: str, body: object = None) -> httpx.Response:
            return await client.request(method, path, json=body, headers=sent[key])

        for name, status in (("acme-1", 200), ("default", 404), ("globex", 404)):
            assert (await ask("acme", "POST", "/v1/training/start", {"lora_adapter": name})).status_code == status
        rows = [{"prompt_token_ids": [1], "completion_token_ids": [2, n], "reward": n % 2} for n in (3, 4)]
        given = {"trajectories": [{**row, "group_id": "g"} for row in rows]}
        assert (await ask("acme", "POST", "/v1/training/update", given)).status_code == 404, "it is the default adapter"
        for key, name in (("acme", "acme-1"), ("free", "default")):
            made = await ask(key, "POST", "/v1/training/update", {**given, "lora_adapter": name})
            assert made.json()["lora_adapter"].partition("@")[0] == name
        models = (await ask("acme", "GET", "/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["acme-1"]
        for name, status in (("acme-1", 200), ("acme-1@2", 200), ("default", 404), ("base", 404), (None, 404)):
            answer = await ask("acme", "POST", "/v1/completions", {"model": name, "prompt": [1, 2], "max_tokens": 1})
            assert answer.status_code == status, name
            assert "default" not in answer.text.replace("'default'", "")
            answer = await ask("free", "POST", "/v1/completions", {"model": name, "prompt": [1, 2], "max_tokens": 1})
            assert answer.status_code == 200
        replaced = {"lora_name": "default", "lora_path": "x", "load_inplace": True}
        assert (await ask("free", "POST", "/v1/load_lora_adapter", replaced)).status_code == 409
        assert 'adapter="default"' not in (await ask("acme", "GET", "/metrics")).text
        assert 'adapter="default"' in (await ask("free", "GET", "/metrics")).text
        by_path = {"adapters": str(tmp_path / "model"), "prompt": [1], "max_tokens": 1}
        assert (await ask("acme", "POST", "/v1/completions", by_path)).status_code == 404


@pytest.mark.timeout(60)
async def test_a_limited_key_teaches_no_default_adapter_by_asking_the_base_model(tmp_path: Path) -> None:
    keys = {"acme": ("train", {"adapters": ("acme*", "base")}), "free": "train"}
    async with serving(tmp_path, trains=True, **keys) as (client, sent):
        body = {"model": "base", "prompt": [1, 2], "max_tokens": 1, "collect_trajectory": True}
        for key, status, collected in (("acme", 409, 0), ("free", 200, 1)):
            answer = await client.post("/v1/completions", json=body, headers=sent[key])
            assert (answer.status_code, "default" in answer.text) == (status, False)
            state = (await client.get("/v1/training/status", headers=sent["free"])).json()
            assert state["trajectories_collected"] == collected
        judged = {"prompt": [1, 2], "max_tokens": 1, "collect_trajectory": True, "scoring_function": "reward_model:x"}
        refused = await client.post("/v1/completions", json=judged, headers=sent["free"])
        assert (refused.status_code, str(tmp_path) in refused.text) == (400, False)
