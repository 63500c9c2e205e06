"""The configured reward of a server: what a request's group is given, and judges that are the server itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from app.test_server import LORA, RL, serving
from tiny import save_tiny

from mlx_parallm import RLIntegratedServer

SOURCE = """
import json, pathlib

def score(prompts, completions, completion_ids, level, **kwargs):
    seen = {"prompts": prompts, "completions": completions, "level": level, "answer": kwargs["answer"]}
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
    return [float(len(ids)) for ids in completion_ids]
"""
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
MARKED = {"collect_trajectory": True, "scoring_function": "reward", "n": 4, "max_tokens": 4, "seed": 1}


def make(folder: Path, reward: str) -> RLIntegratedServer:
    save_tiny("llama", folder / "model")
    (folder / "rewards.py").write_text(SOURCE)
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "2 + 2 =", "answer": 4, "level": "easy"}))
    return RLIntegratedServer(
        folder / "model",
        LORA,
        RL,
        server__kv_cache_memory="16MB",
        server__api_key="secret",
        checkpointing__checkpoint_dir=folder / "checkpoints",
        rl_training__environment=str(folder / "tasks.jsonl"),
        rl_training__server_rollouts=False,
        rl_training__reward=reward.replace("F", f"{folder}/rewards.py"),
    )


async def scored(client: httpx.AsyncClient, groups: int) -> list[dict[str, object]]:
    """The cards of the trajectories of so many groups, when all have their rewards."""
    while True:
        cards = (await client.get("/debug/trajectories")).json()["data"]
        if len(cards) == 4 * groups and "waiting" not in {card["state"] for card in cards}:
            return cards
        await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
async def test_a_request_names_the_reward_and_the_task_of_the_server_adds_its_columns(tmp_path: Path) -> None:
    async with serving(make(tmp_path, "F:score")) as client:
        client.headers["Authorization"] = "Bearer secret"
        await client.post("/v1/training/pause", json={})
        answer = await client.post("/v1/chat/completions", json={"messages": TURNS, **MARKED})
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        cards = await scored(client, 1)
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert (seen["prompts"], seen["level"], seen["answer"]) == ([TURNS] * 4, ["easy"] * 4, [4] * 4)
        assert [completion[0]["content"].strip() for completion in seen["completions"]] == [t.strip() for t in texts]
        assert {card["reward"] for card in cards} <= {1.0, 2.0, 3.0, 4.0}
        named = await client.post(
            "/v1/completions", json={"prompt": "2 + 2 =", **MARKED, "metadata": {"level": "mine"}}
        )
        assert named.status_code == 200
        await scored(client, 2)
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert (seen["prompts"], seen["level"], seen["answer"]) == (["2 + 2 ="] * 4, ["mine"] * 4, [4] * 4)
        for name in ("rewards.py:score", f"{tmp_path}/rewards.py:score"):
            refused = await client.post("/v1/completions", json={"prompt": "a", **MARKED, "scoring_function": name})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scoring_function")


@pytest.mark.timeout(120)
async def test_a_judge_may_be_the_base_model_of_this_very_server(tmp_path: Path) -> None:
    """Its requests are ordinary ones: they are answered while groups wait for them."""
    async with serving(make(tmp_path, "1*judge + 0.5*rank")) as client:
        client.headers["Authorization"] = "Bearer secret"
        await client.post("/v1/training/pause", json={})
        for prompt in ("2 + 2 =", "Another."):
            assert (await client.post("/v1/completions", json={"prompt": prompt, **MARKED})).status_code == 200
        cards = await scored(client, 2)
        assert {card["reason"] for card in cards} <= {"", "no_signal"}
        for card in cards:
            assert card["reward"] == pytest.approx(round(card["reward"] * 20) / 20)
            assert 0 <= card["reward"] <= 1.5
