"""Reward models of a tiny model: what `mlx_parallm reward-model` learns, writes and prints, and how a server scores."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from app.test_server import LORA, MARKED, RL, serving
from lora import layout_of, merged, random_adapter
from tiny import EOS_ID, save_tiny, tiny_model

from mlx_parallm import RLIntegratedServer
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.cli.main import main

WORDS = ("lamp", "tree", "boat", "rock", "door", "song", "rain", "milk")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and preferences for answers that end with "!"."""
    save_tiny("llama", tmp_path / "model")
    rows = [
        {"prompt": f"Say {one}.", "chosen": f"{other}!", "rejected": f"{other}?"}
        for one in WORDS
        for other in WORDS[:3]
    ]
    (tmp_path / "preferences.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*more: str) -> int:
    settings = ["--preferences", "preferences.jsonl", "--adapter-dir", "adapters", "--model-path", "model"]
    small = ["--lora-rank", "4", "--lora-target-modules", "q_proj,v_proj", "--batch-size", "4", "--epochs", "1"]
    return main(["reward-model", "loud", *settings, *small, *more])


def test_a_reward_model_agrees_with_held_out_preferences(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--held-out", "0.25", "--learning-rate", "0.01") == 0
    printed = capsys.readouterr().out
    assert "agreement with 6 held-out preferences: 1.000 (95 % interval 0.6" in printed
    assert printed.rstrip().endswith("name it as the scorer reward_model:loud")
    manifest = json.loads((place / "adapters" / "loud" / "manifest.json").read_text())
    assert manifest["metrics"]["held_out_agreement"] == 1.0
    assert manifest["metrics"]["preferences"] == 18
    assert manifest["metrics"]["steps"] == 5


def test_held_out_preferences_may_be_another_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "quiet.jsonl").write_text(json.dumps({"prompt": "Say sun.", "chosen": "moon?", "rejected": "moon!"}))
    assert train("--held-out", "quiet.jsonl", "--learning-rate", "0.01") == 0
    assert "agreement with 1 held-out preferences: 0.000" in capsys.readouterr().out


def test_what_is_wrong_is_said_before_the_model_is_loaded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "adapters" / "loud").mkdir(parents=True)
    assert train() == 1
    assert "exists; choose another name" in capsys.readouterr().err
    assert main(["reward-model", "x", "--preferences", "preferences.jsonl"]) == 2
    assert "--adapter-dir: name the folder" in capsys.readouterr().err
    for flag, value in (("--held-out", "1.5"), ("--epochs", "0"), ("--learning-rate", "nan")):
        assert train(flag, value) == 2
        assert f"argument {flag}: must be" in capsys.readouterr().err
    assert train("--preferences", "none.jsonl", "--adapter-dir", "others") == 2
    assert "--preferences: none.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.timeout(120)
async def test_a_server_scores_answers_with_a_reward_model(tmp_path: Path) -> None:
    """Its rewards are the head's products with the hidden states of a model with the adapter merged into it."""
    model = save_tiny("llama", tmp_path / "model")
    layout = layout_of(model)
    adapter = random_adapter(layout, 1, targets=("q_proj", "down_proj"))
    head = np.random.default_rng(2).normal(size=layout.hidden).astype(np.float32)
    write_peft(tmp_path / "adapters" / "mine", adapter, layout, None, head)
    server = RLIntegratedServer(
        *(tmp_path / "model", LORA, RL),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        adapters__adapter_dir=tmp_path / "adapters",
    )
    async with serving(server) as client:
        unknown = await client.post("/v1/completions", json={**MARKED, "scoring_function": "reward_model:other"})
        assert unknown.status_code == 400
        assert "no reward model is called 'other'" in unknown.json()["error"]["message"]
        answer = await client.post("/v1/completions", json={**MARKED, "scoring_function": "reward_model:mine"})
        assert len(answer.json()["trajectory_ids"]) == 4
        cards = await trajectories(client)
        while len(cards) < 4 or any(card["reward"] is None for card in cards):
            await asyncio.sleep(0.02)
            cards = await trajectories(client)
        models = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert "mine" not in models
    plain = merged(tiny_model("llama"), adapter)
    for card in cards:
        row = [*card["prompt_token_ids"], *card["completion_token_ids"]]
        row += [] if row[-1] == EOS_ID else [EOS_ID]
        want = (plain.model(mx.array([row]))[0, -1] * mx.array(head)).sum().item()
        assert card["reward"] == pytest.approx(want, abs=1e-3)
    assert len({card["reward"] for card in cards}) == 4
    await ended(server)


@pytest.mark.timeout(120)
async def test_a_server_trains_a_reward_model_on_the_preferences_that_were_sent(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "adapters").mkdir()
    server = RLIntegratedServer(
        *(tmp_path / "model", LORA, RL),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        adapters__adapter_dir=tmp_path / "adapters",
    )
    spec = {"name": "loud", "held_out": 0.34, "batch_size": 2, "learning_rate": 0.02}
    async with serving(server) as client:
        refused = await client.post("/v1/training/reward_model", json=spec)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        for word in WORDS[:6]:
            body = {"prompt": f"Say {word}.", "chosen": f"{word}!", "rejected": f"{word}?"}
            assert (await client.post("/v1/training/preference", json=body)).status_code == 200
        card = (await client.post("/v1/training/reward_model", json=spec)).json()
        assert (card["preferences"], card["held_out"], card["held_out_agreement"]) == (4, 2, 1.0)
        scored = {**MARKED, "scoring_function": card["scoring_function"]}
        assert len((await client.post("/v1/completions", json=scored)).json()["trajectory_ids"]) == 4
        while (await client.get("/v1/training/status")).json()["updates_total"] == 0:
            await asyncio.sleep(0.02)
    await ended(server)


async def ended(server: RLIntegratedServer) -> None:
    """Waits for the device thread's end, which MLX needs before the process ends."""
    while server._engine.processor.stats().alive:
        await asyncio.sleep(0.02)


async def trajectories(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get("/debug/trajectories")
    return list(answer.json()["data"])
