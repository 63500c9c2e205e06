"""A server with two base models, of which only one fits beside the KV cache."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import mlx.core as mx
import mlx.nn as nn
import pytest
from app.test_server import serving as running
from harness import assert_same_tokens, solo
from lora import layout_of, random_adapter
from mlx.utils import tree_flatten
from server.asking import answered
from tiny import save_tiny

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.app import train
from mlx_parallm.app.base_paths import BasePath, base_of_adapter, bases_of_adapter
from mlx_parallm.app.models import DeviceLoader
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.config import configure
from mlx_parallm.errors import ConfigError

pytestmark = pytest.mark.ci

KV, BUFFERS = 1 << 20, 1 << 20
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, nn.Module]]:
    """The folder of two models of different families, and the models themselves."""
    folder = tmp_path_factory.mktemp("models")
    return folder, {
        "one": save_tiny("llama", folder / "one", seed=1),
        "two": save_tiny("qwen3", folder / "two", seed=2),
    }


@pytest.fixture
def limits_restored():
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def bytes_of(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@asynccontextmanager
async def serving(
    folder: Path, weights: int, **keys: object
) -> AsyncIterator[tuple[httpx.AsyncClient, IntegratedServer]]:
    """A server of the models in `folder` with room for so many bytes of weights."""
    keys = {"rl_training__enabled": False, "server__kv_cache_memory": KV, "server__mlx_cache_limit": BUFFERS, **keys}
    keys["server__mlx_memory_limit"] = KV + BUFFERS + weights
    server = IntegratedServer(configure(folder, **keys))
    async with running(server, trains=False) as client:
        yield client, server


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded and unloaded, in order."""
    log: list[str] = []
    load, unload = DeviceLoader.load, DeviceLoader.unload

    async def logged_load(self: DeviceLoader, base: str):
        log.append(f"+{base}")
        return await load(self, base)

    async def logged_unload(self: DeviceLoader, base: str) -> None:
        await unload(self, base)
        log.append(f"-{base}")

    monkeypatch.setattr(DeviceLoader, "load", logged_load)
    monkeypatch.setattr(DeviceLoader, "unload", logged_unload)
    return log


def body(model: str, number: int, max_tokens: int = 6, **fields: object) -> dict[str, object]:
    prompt = [3 + number, 1, 4, 1, 5, 9]
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, **greedy, **fields}


async def ask(client: httpx.AsyncClient, sent: dict[str, object]) -> dict[str, object]:
    return await answered(client, "/v1/completions", sent)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["state"] for model in listed if model["id"] in ("one", "two")}


@pytest.mark.timeout(120)
async def test_two_base_models_take_turns(models, loads, limits_restored) -> None:
    folder, each = models
    most = max(map(bytes_of, each.values()))
    async with serving(folder, weights=int(1.5 * most)) as (client, _):
        assert await states(client) == {"one": "loaded", "two": "idle"}
        sent = [body("two" if number % 3 else "one", number) for number in range(12)]
        answers = await asyncio.gather(*(ask(client, request) for request in sent))
        for request, answer in zip(sent, answers, strict=True):
            assert answer["model"] == request["model"]
            expected = solo(each[str(request["model"])], request["prompt"], 6)
            assert_same_tokens(answer["choices"][0]["token_ids"], expected, TOLERANCE)
        assert loads.count("+two") == 1, "all that waited for it were served together"
        assert sorted((await states(client)).values()) == ["idle", "loaded"]
        assert (await client.get("/debug/state")).json()["engine"]["failed_steps_total"] == 0


@pytest.mark.timeout(120)
async def test_rows_in_flight_end_before_their_base_model_is_unloaded(models, loads, limits_restored) -> None:
    folder, each = models
    async with serving(folder, weights=int(1.5 * max(map(bytes_of, each.values())))) as (client, server):
        server._engine.load_seconds = 0.0
        ended: list[str] = []

        async def asked(name: str, max_tokens: int) -> None:
            answer = await ask(client, body(name, 1, max_tokens))
            assert answer["usage"]["completion_tokens"] == max_tokens
            ended.append(name)
            if name == "one":
                assert loads == [], "it was loaded until its rows had ended"

        long = asyncio.create_task(asked("one", 400))
        while (await client.get("/debug/state")).json()["engine"]["running"] != 1:
            assert not long.done(), "it ended before it was seen to run"
            await asyncio.sleep(0.005)
        await asyncio.gather(long, asked("two", 3))
        assert ended == ["one", "two"]
        assert loads == ["-one", "+two"]


@pytest.mark.timeout(120)
async def test_memory_is_given_back(models, loads, limits_restored) -> None:
    folder, each = models
    sizes = {name: bytes_of(model) for name, model in each.items()}
    gc.collect()
    before = mx.get_active_memory()
    async with serving(folder, weights=sum(sizes.values()), model__idle_unload=0.05) as (client, _):
        await asyncio.gather(ask(client, body("one", 1)), ask(client, body("two", 1)))
        gc.freeze()  # as a server does once it has started
        while await states(client) != {"one": "idle", "two": "idle"}:
            await asyncio.sleep(0.02)
        gc.collect()
        assert mx.get_active_memory() - before < min(sizes.values()), "no weights are held"
        assert (await client.get("/health")).status_code == 200
        await ask(client, body("one", 1))
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.timeout(120)
async def test_adapters_belong_to_their_base_model(models, tmp_path, limits_restored) -> None:
    folder, each = models
    for name, base in (("tone", "one"), ("math", "two")):
        layout = layout_of(each[base])
        (tmp_path / name).mkdir()
        write_peft(tmp_path / name, random_adapter(layout, seed=1, size=2.0), layout, base_model=f"org/{base}")
    room = sum(map(bytes_of, each.values()))
    async with serving(folder, weights=room, adapters__adapter_dir=str(tmp_path)) as (client, _):
        listed = {model["id"]: model["parent"] for model in (await client.get("/v1/models")).json()["data"]}
        assert (listed["tone"], listed["math"]) == ("one", "two")
        answer = await ask(client, body("math", 1))
        assert answer["lora_adapter"] == "math@1"
        plain = await ask(client, body("two", 1))
        assert answer["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]
        assert (await ask(client, body("two", 1, lora_adapter="math")))["lora_adapter"] == "math@1"
        refused = await client.post("/v1/completions", json=body("one", 1, lora_adapter="math"))
        assert refused.status_code == 400
        assert "belongs to the base model two" in refused.json()["error"]["message"]
        routed = await client.post("/v1/adapters/route", json={"weights": {"tone": 1, "base": 1}})
        assert routed.json() == {"route": {"tone": 0.5, "base": 0.5}}
        refused = await client.post("/v1/adapters/route", json={"weights": {"math": 1}})
        assert (refused.status_code, "is an adapter of two" in refused.text) == (400, True)
        unknown = await client.post("/v1/completions", json=body("nobody", 1))
        assert unknown.status_code == 404


@pytest.mark.timeout(120)
async def test_a_loaded_adapter_is_for_the_base_model_that_is_named(models, tmp_path, limits_restored) -> None:
    """Not for the one that its files name."""
    folder, each = models
    layout = layout_of(each["two"])
    (tmp_path / "tone").mkdir()
    write_peft(tmp_path / "tone", random_adapter(layout, seed=1, size=2.0), layout, base_model="org/one")
    room = sum(map(bytes_of, each.values()))
    async with serving(folder, weights=room, adapters__allowed_adapter_roots=str(tmp_path)) as (client, _):
        sent = {"lora_name": "tone", "lora_path": str(tmp_path / "tone"), "base_model_name": "two"}
        loaded = await client.post("/v1/load_lora_adapter", json=sent)
        assert loaded.json()["base_model_name"] == "two", loaded.text
        plain, tuned = await ask(client, body("two", 1)), await ask(client, body("tone", 1))
        assert plain["choices"][0]["token_ids"] != tuned["choices"][0]["token_ids"]
        other = await client.post("/v1/load_lora_adapter", json=sent | {"base_model_name": "one", "load_inplace": True})
        assert (other.status_code, "is an adapter of two" in other.text) == (400, True)
        kept = await client.post("/v1/unload_lora_adapter", json={"lora_name": "tone", "base_model_name": "one"})
        assert (kept.status_code, "one has no adapter 'tone'" in kept.text) == (404, True)
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "tone", "base_model_name": "two"})
        assert gone.json()["unloaded"] == ["tone@1"]
        metrics = (await client.get("/metrics")).text
        for name in ("one", "two"):
            assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0' in metrics
        assert 'mlx_parallm_request_success_total{finished_reason="length",model_name="two"} 2.0' in metrics


def test_files_may_mean_several_base_models(tmp_path) -> None:
    bases = tuple(BasePath(f"{folder}/model", name) for folder, name in (("a", "first"), ("b", "second")))
    for declared, expected in (
        ("org/model", ("first", "second")),
        ("b/model", ("second",)),
        ("second", ("second",)),
        ("org/other", ()),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": declared}))
        assert bases_of_adapter(tmp_path, bases) == expected
        assert base_of_adapter(tmp_path, bases) == (*expected, "first")[0]


@pytest.mark.timeout(120)
async def test_a_base_model_that_cannot_be_loaded_costs_only_its_requests(tmp_path, limits_restored) -> None:
    save_tiny("llama", tmp_path / "one", seed=1)
    save_tiny("llama", tmp_path / "two", seed=1)
    async with serving(tmp_path, weights=1 << 30) as (client, _):
        (tmp_path / "two/model.safetensors").write_bytes(b"no weights")
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body(name, 1)) for name in ("one", "two", "one"))
        )
        assert [answer.status_code for answer in answers] == [200, 503, 200]
        error = answers[1].json()["error"]
        assert error["code"] == "model_unavailable"
        assert str(tmp_path) not in json.dumps(error)
        assert await states(client) == {"one": "loaded", "two": "failed"}


@pytest.mark.timeout(120)
async def test_a_base_model_that_cannot_be_measured_keeps_no_memory(models, monkeypatch, limits_restored) -> None:
    folder, each = models

    def refused(*_: object) -> None:
        raise ConfigError("--attention kernel cannot be used")

    async with serving(folder, weights=sum(map(bytes_of, each.values()))) as (client, server):
        monkeypatch.setattr("mlx_parallm.app.base_model.choose_attention", refused)
        assert (await client.post("/v1/completions", json=body("two", 1))).status_code == 503
        assert await states(client) == {"one": "loaded", "two": "failed"}
        assert len(server._engine.shared.memories) == 1
        assert (await ask(client, body("one", 1)))["model"] == "one"


@pytest.mark.timeout(120)
async def test_others_are_served_during_a_load_and_the_server_can_end_in_it(
    models, monkeypatch, limits_restored
) -> None:
    folder, each = models

    def endless(*_: object, **__: object) -> Iterator[None]:
        while True:
            time.sleep(0.002)
            yield

    monkeypatch.setattr("mlx_parallm.app.base_model.materializing", endless)
    async with serving(folder, weights=sum(map(bytes_of, each.values()))) as (client, server):
        waiting = asyncio.create_task(client.post("/v1/completions", json=body("two", 1)))
        while await states(client) != {"one": "loaded", "two": "loading"}:
            await asyncio.sleep(0.01)
        assert (await ask(client, body("one", 1)))["model"] == "one"
        assert not waiting.done()
    assert not server._engine.processor.stats().alive
    with suppress(httpx.TransportError):
        assert (await waiting).status_code == 503


def test_a_training_run_has_one_base_model(tmp_path) -> None:
    config = configure(tmp_path / "one", model__other_base_models=str(tmp_path / "two"))
    with pytest.raises(ConfigError, match="--model-path"):
        train.run(config, TrainOptions("gsm8k", 1, 1, 1), None)  # type: ignore[arg-type]
