"""`/v1/training/average` on a server of a tiny model: it goes live evaluated and saved, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from app.test_server import LORA, RL, serving
from lora import layout_of, merged, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm import RLIntegratedServer
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair

AVERAGE = "/v1/training/average"
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
BODY = {"adapters": [*SHARES], "weights": [50, 30, 20], "lora_adapter": "mean"}
SCORE = """
from pathlib import Path

def score(sample):
    return float(Path(__file__).with_name("score.txt").read_text())
"""


@pytest.fixture
def members(tmp_path: Path) -> dict[str, AdapterWeights]:
    """The adapters a, b and c that the server has, of different ranks, scales and linears."""
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    targets = {"a": ("q_proj", "v_proj"), "b": ("q_proj", "down_proj"), "c": ("o_proj", "lm_head")}
    found = {}
    for rank, (name, names) in enumerate(targets.items(), 2):
        found[name] = random_adapter(layout, rank, rank, names, size=2.0, scale=rank / 2)
        write_peft(tmp_path / "adapters" / name, found[name], layout, None)
    return found


def make(tmp_path: Path, **keys: object) -> RLIntegratedServer:
    folders = {"adapters__adapter_dir": tmp_path / "adapters", "checkpointing__checkpoint_dir": tmp_path / "kept"}
    return RLIntegratedServer(tmp_path / "model", LORA, RL, server__kv_cache_memory="16MB", **folders, **keys)


async def logprobs(client: httpx.AsyncClient, adapter: str) -> np.ndarray:
    """Of the tokens of one prompt under an adapter, raw."""
    body = {"model": adapter, "prompt": [72, 101, 108, 108, 111, 32, 87], "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return np.array(answer["choices"][0]["logprobs"]["token_logprobs"][1:7])


def expected(members: dict[str, AdapterWeights]) -> np.ndarray:
    """The same by mlx-lm's own model, its weights changed by the mean of the adapters' products."""
    model = tiny_model("llama")
    for name, share in SHARES.items():
        pairs = {path: LoRAPair(p.a, p.b, share * p.scale) for path, p in members[name].pairs.items()}
        model = merged(model, AdapterWeights(pairs))
    tokens = mx.array([[72, 101, 108, 108, 111, 32, 87]])
    logits = model(tokens)[0, :-1]
    found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(found, tokens[0, 1:, None], axis=-1))[:, 0]


async def averages_in_events(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """What the events about the first averages say."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/v1/training/events", headers={"last-event-id": "unknown"}) as stream:
        async for line in stream.aiter_lines():
            event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            found += [event["data"]] if event.get("kind") == "averaged" else []
            if len(found) == count:
                break
    return found


async def names(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/adapters")).json()["data"]]


@pytest.mark.timeout(120)
async def test_an_average_is_live_and_saved_and_outlives_the_server(
    tmp_path: Path, members: dict[str, AdapterWeights]
) -> None:
    async with serving(make(tmp_path)) as client:
        made = (await client.post(AVERAGE, json=BODY)).raise_for_status().json()
        facts = {name: made[name] for name in ("status", "reason", "lora_adapter", "adapters", "rank", "full_rank")}
        assert facts == {
            "status": "published",
            "reason": "",
            "lora_adapter": "mean@1",
            "adapters": ["a@1", "b@1", "c@1"],
            "rank": 5,
            "full_rank": 5,
        }
        assert (made["error"], made["evaluation"], made["checkpoint"]) == (0.0, None, "checkpoint-1")
        served = await logprobs(client, "mean")
        np.testing.assert_allclose(served, expected(members), atol=1e-5)
        lower = (await client.post(AVERAGE, json=BODY | {"rank": 2})).raise_for_status().json()
        assert (lower["lora_adapter"], lower["rank"]) == ("mean@2", 2)
        assert 0.01 < lower["error"] < lower["worst_error"] < 1
        for changes, status, param in (
            ({"adapters": ["a", "nobody"], "weights": None}, 404, "adapters"),
            ({"adapters": ["a", "base"], "weights": None}, 400, "adapters"),
            ({"weights": [1]}, 400, "weights"),
            ({"weights": [1, 1, -1]}, 400, "weights"),
            ({"rank": 6}, 400, "rank"),
            ({"lora_adapter": "default"}, 409, "lora_adapter"),
            ({"lora_adapter": "../mean"}, 400, "lora_adapter"),
        ):
            refused = await client.post(AVERAGE, json=BODY | changes)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
        many = {"adapters": ["a", "b", "c"] * 4, "weights": None}
        refused = await client.post(AVERAGE, json=BODY | many)
        assert "20 is over --max-lora-rank 16" in refused.json()["error"]["message"]
        assert await names(client) == ["a@1", "b@1", "c@1", "mean@1", "mean@2"]
        before = await logprobs(client, "mean")
    async with serving(make(tmp_path, checkpointing__resume=True)) as client:
        assert np.array_equal(await logprobs(client, "mean"), before)
        assert "mean@2" in await names(client)


@pytest.mark.timeout(120)
async def test_an_average_below_the_floor_or_without_an_evaluation_is_held(
    tmp_path: Path, members: dict[str, AdapterWeights]
) -> None:
    (tmp_path / "rewards.py").write_text(SCORE)
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    keys = {
        "rl_training__reward": f"{tmp_path / 'rewards.py'}:score",
        "rl_training__evaluation__tasks": str(tmp_path / "held-out.jsonl"),
        "rl_training__evaluation__every": 100,
        "rl_training__evaluation__max_tokens": 4,
        "rl_training__gate__eval_floor": 0.5,
    }
    score, before = tmp_path / "score.txt", ["a@1", "b@1", "c@1"]
    async with serving(make(tmp_path, **keys)) as client:
        score.write_text("0.25")
        held = (await client.post(AVERAGE, json=BODY)).raise_for_status().json()
        assert (held["status"], held["lora_adapter"], held["checkpoint"]) == ("held", None, None)
        assert held["reason"] == "the mean reward of 0.25 is below eval_floor 0.5"
        assert (held["evaluation"]["mean"], held["evaluation"]["answers"]) == (0.25, 2)
        score.unlink()
        held = (await client.post(AVERAGE, json=BODY)).raise_for_status().json()
        assert (held["status"], held["evaluation"]) == ("held", None)
        assert held["reason"].startswith("the evaluation failed: 2 of 2 held-out tasks failed")
        assert await names(client) == before
        assert (await client.post("/v1/completions", json={"model": "mean", "prompt": "x"})).status_code == 404
        assert not (tmp_path / "kept" / "mean").exists()
        score.write_text("0.75")
        made = (await client.post(AVERAGE, json=BODY)).raise_for_status().json()
        assert (made["status"], made["evaluation"]["mean"]) == ("published", 0.75)
        held, failed, published = await averages_in_events(client, 3)
        assert (held["version"], held["reason"]) == (None, "the mean reward of 0.25 is below eval_floor 0.5")
        assert (failed["version"], failed["metrics"]) == (None, {})
        names_of = [published[name] for name in ("adapter", "version", "adapters", "checkpoint")]
        assert names_of == ["mean", made["lora_adapter"], before, made["checkpoint"]]
        assert published["metrics"]["eval_mean"] == 0.75
        assert await names(client) == [*before, made["lora_adapter"]]
