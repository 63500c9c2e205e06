"""Families with each kind of attention and state learn a task over HTTP, through a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import free_port
from family_checks import CONFIGURATIONS, random_model
from lora import layout_of
from tiny import save_directory

FAMILIES = {
    "qwen3_5": "gated delta nets and attention",
    "glm4_moe_lite": "latent attention",
    "gemma4_text": "keys and values that layers share",
    "gpt_oss": "experts",
}
ROUNDS, KILLED_AFTER, ANSWERS, TOKENS = 16, 8, 16, 8
VOCABULARY = 64
PROMPT = [5, 9, 14, 3, 3, 8, 21, 40, 2, 7]
PROGRAM = """
import asyncio, json, sys
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer

async def main(folder, port, targets):
    lora = LoRAConfig(rank=8, alpha=16.0, target_modules=tuple(targets))
    rl = RLConfig(learning_rate=1e-2, batch_size=ANSWERS, kl_coef=0.0)
    keys = {"server__kv_cache_memory": "32MB", "checkpointing__checkpoint_dir": f"{folder}/run"}
    server = RLIntegratedServer(f"{folder}/model", lora, rl, **keys)
    await asyncio.gather(server.run_inference(port=port), server.run_training_loop())

asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
""".replace("ANSWERS", str(ANSWERS))


@contextmanager
def serving(folder: Path, targets: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """A server of its own process, which is killed when the block ends."""
    port = free_port()
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(port), targets], env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            while not is_ready(client):
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
            yield client, process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def with_vocabulary(config: dict[str, Any]) -> dict[str, Any]:
    """The same with a small vocabulary, of which a reward of some tokens is learnt in few updates."""
    changed = {name: VOCABULARY for name in config if name.startswith("vocab_size")}
    return config | changed | {name: with_vocabulary(each) for name, each in config.items() if isinstance(each, dict)}


def posted(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def status(client: httpx.Client) -> Any:
    return client.get("/v1/training/status").json()


def round_of(client: httpx.Client, number: int) -> float:
    """Answers that are collected, scored and learnt from. Returns the mean reward: the share of ids below 16."""
    asked = {"prompt": PROMPT, "n": ANSWERS, "max_tokens": TOKENS, "seed": number}
    answer = posted(client, "/v1/completions", **asked, collect_trajectory=True, return_token_ids=True)
    rewards = [sum(token < 16 for token in each["token_ids"]) / len(each["token_ids"]) for each in answer["choices"]]
    before = status(client)["updates_total"]
    for trajectory, reward in zip(answer["trajectory_ids"], rewards, strict=True):
        posted(client, "/v1/training/feedback", trajectory_id=trajectory, score=reward)
    while status(client)["updates_total"] == before:
        time.sleep(0.05)
    return statistics.fmean(rewards)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reward_climbs_through_a_kill(family: str, tmp_path: Path) -> None:
    config = with_vocabulary({"max_position_embeddings": 512, **CONFIGURATIONS[family]})
    model = random_model(config)
    save_directory(model, config, tmp_path / "model")
    targets = json.dumps(sorted({spec.target for spec in layout_of(model).linears.values() if not spec.chooses}))
    with serving(tmp_path, targets) as (client, _):
        rewards = [round_of(client, number) for number in range(KILLED_AFTER)]
        learnt = status(client)
    with serving(tmp_path, targets) as (client, _):
        while (again := status(client))["updates_total"] < KILLED_AFTER:  # the last one may be made again
            time.sleep(0.05)
        assert again["current_lora"] == learnt["current_lora"]
        rewards += [round_of(client, number) for number in range(KILLED_AFTER, ROUNDS)]
    print(family, [round(each, 2) for each in rewards])
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.15
    assert statistics.fmean(rewards[KILLED_AFTER:][:3]) > statistics.fmean(rewards[:3])
