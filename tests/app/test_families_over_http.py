"""Families with each kind of attention and state, over HTTP: every answer is that of its own adapter alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from app.test_server import serving
from family_checks import CONFIGURATIONS, build
from harness import Solo, assert_same_tokens, solo
from lora import layout_of, merged, random_adapter
from tiny import save_directory

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure

FAMILIES = {
    "qwen3_5": "gated delta nets",
    "deepseek_v3": "latent attention and experts",
    "gemma4_text": "shared keys and values, windows",
    "gpt_oss": "experts, sinks, windows",
}
ADAPTERS = ("one", "two", "three")
CLIENTS, ASKS, LONGEST, TOKENS = 8, 4, 80, 12
GREEDY = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
TOLERANCE = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
async def test_eight_clients_with_three_adapters_and_the_base(family: str, tmp_path: Path) -> None:
    config = {"max_position_embeddings": 512, **CONFIGURATIONS[family]}
    save_directory(build(family), config, tmp_path / "model")
    layout = layout_of(build(family))
    linears = {spec.target for spec in layout.linears.values()}
    weights = {name: random_adapter(layout, seed, targets=linears) for seed, name in enumerate(ADAPTERS)}
    for name, each in weights.items():
        write_mlx_lm(_new(tmp_path / "adapters" / name), each, layout)
    models = {"base": build(family)} | {name: merged(build(family), each) for name, each in weights.items()}
    keys = {"rl_training__enabled": False, "adapters__adapter_dir": tmp_path / "adapters"}
    server = IntegratedServer(configure(tmp_path / "model", server__kv_cache_memory="64MB", **keys))
    rng = random.Random(0)
    shared = [rng.randrange(100) for _ in range(LONGEST)]
    asked: list[tuple[str, list[int], list[int]]] = []

    async def client(http: httpx.AsyncClient, number: int) -> None:
        for ask in range(ASKS):
            name = ("base", *ADAPTERS)[(number + ask) % 4]
            prompt = [*shared[: rng.randrange(LONGEST)], rng.randrange(100)]
            body = {"prompt": prompt, "model": "model" if name == "base" else name, **GREEDY}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status()
            asked.append((name, prompt, answer.json()["choices"][0]["token_ids"]))

    async def reloads(http: httpx.AsyncClient) -> None:
        for name in ADAPTERS * 2:
            body = {"lora_name": name, "lora_path": name, "load_inplace": True}
            (await http.post("/v1/load_lora_adapter", json=body)).raise_for_status()

    async with serving(server, trains=False) as http:
        await asyncio.gather(reloads(http), *(client(http, number) for number in range(CLIENTS)))
    assert len(asked) == CLIENTS * ASKS
    references: list[Solo] = [solo(models[name], prompt, TOKENS) for name, prompt, _ in asked]
    for (_, _, tokens), reference in zip(asked, references, strict=True):
        assert_same_tokens(tokens, reference, TOLERANCE)


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
