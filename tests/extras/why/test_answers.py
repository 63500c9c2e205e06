"""`/v1/training/why` on a server of a tiny model: the version of an answer, and what pushed it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import make, serving

WHY = "/v1/training/why"
PROMPT, PLANTED, OTHER = [72, 105], [40, 41, 42], [90, 91]


async def update(client: httpx.AsyncClient, completions: list[list[int]], **fields: Any) -> None:
    """One update, whose first completion is the best one."""
    given = [
        {"prompt_token_ids": PROMPT, "completion_token_ids": each, "reward": float(at == 0), "group_id": "g", **fields}
        for at, each in enumerate(completions)
    ]
    made = await client.post("/v1/training/update", json={"trajectories": given})
    assert made.json()["status"] == "published", made.text


async def asked(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(WHY, json={"version": "default", "prompt": PROMPT, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.timeout(120)
async def test_the_sample_that_taught_an_answer_pushed_it_most(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        for number in range(3):
            await update(client, [[60 + number, 61], [70 + number, 71], [80 + number, 81]])
        await update(client, [PLANTED, [100, 101]])
        found = await asked(client, completion=PLANTED)
        assert (found["version"], found["weights"], found["preconditioned"]) == ("default@4", "default@4", True)
        assert (found["samples_total"], found["samples_looked_at"], found["problems"]) == (11, 11, [])
        best = found["towards"][0]
        assert (best["update"], best["reward"], best["answer"]) == (found["updates"][0]["update"], 1.0, "IJK")
        assert best["score"] > 0
        every = await asked(client, completion=PLANTED, top=100, rank_by="score")
        of_samples, of_updates = [*every["towards"], *every["away"]], found["updates"]
        assert sum(each["score"] for each in of_updates) == pytest.approx(sum(each["score"] for each in of_samples))
        other = await asked(client, completion=OTHER, samples=4)
        assert (other["samples_total"], other["samples_looked_at"]) == (11, 4)
        before = (await client.get(WHY)).json()
        earlier = await asked(client, version="default@1", completion=PLANTED)
        assert earlier["samples_total"] == 3
        assert (await client.get(WHY)).json() == before, "to ask changes nothing"


@pytest.mark.timeout(120)
async def test_a_collected_answer_is_asked_about_by_its_id(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        collects = {"prompt": PROMPT, "max_tokens": 3, "collect_trajectory": True, "seed": 1}
        of_base = (await client.post("/v1/completions", json=collects)).json()["trajectory_ids"][0]
        await update(client, [PLANTED, OTHER])
        answer = (await client.post("/v1/completions", json=collects)).json()
        assert answer["lora_adapter"] == "default@1"
        found = (await client.post(WHY, json={"trajectory_id": answer["trajectory_ids"][0]})).json()
        assert (found["version"], found["samples_looked_at"]) == ("default@1", 2)
        for body, status, said in (
            ({"trajectory_id": of_base}, 400, "The base model gave it"),
            ({"trajectory_id": "unknown"}, 404, "No collected answer"),
            ({"version": "default", "prompt": PROMPT, "completion": [10**6]}, 400, "vocabulary"),
            ({"version": "nobody", "prompt": PROMPT, "completion": OTHER}, 404, "nobody"),
            ({"version": "default", "prompt": PROMPT}, 400, "send this"),
        ):
            refused = await client.post(WHY, json=body)
            assert (refused.status_code, said in refused.text) == (status, True), refused.text


@pytest.mark.timeout(120)
async def test_the_weights_are_those_of_the_version_as_long_as_they_are_anywhere(tmp_path: Path) -> None:
    async with serving(make(tmp_path, adapters__max_loras=2, adapters__max_cpu_loras=0)) as client:
        await update(client, [PLANTED, OTHER])
        await client.post("/v1/training/checkpoint", json={"lora_name": "default"}, timeout=60)
        before = await asked(client, completion=PLANTED)
        for number in range(3):
            await update(client, [[60 + number, 61], [70 + number, 71]])
        after = await asked(client, version="default@1", completion=PLANTED)
        assert after["weights"] == "default@1, from checkpoint-1"
        of_version = ("towards", "away", "logprob", "preconditioned")
        assert [after[name] for name in of_version] == [before[name] for name in of_version]
        gone = await asked(client, version="default@2", completion=PLANTED)
        assert gone["weights"].startswith(("default@2", "the policy of default in training"))


@pytest.mark.timeout(120)
async def test_one_answer_at_a_time_and_a_client_that_leaves_gives_it_up(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        many = [[at, at + 1, *range(100, 180)] for at in range(60)]
        await update(client, many)
        body = {"version": "default", "prompt": PROMPT, "completion": PLANTED, "samples": 4000}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(WHY, json=body, timeout=0.3)
        statuses = []
        while not statuses or statuses[-1] != 200:
            statuses.append((await client.post(WHY, json={**body, "samples": 1})).status_code)
            await asyncio.sleep(0.01)
        assert set(statuses) <= {200, 409}
        one, other = await asyncio.gather(*(client.post(WHY, json=body, timeout=60) for _ in range(2)))
        assert sorted([one.status_code, other.status_code]) == [200, 409]


@pytest.mark.timeout(120)
async def test_what_was_forgotten_is_counted_and_gone(tmp_path: Path) -> None:
    async with serving(make(tmp_path)) as client:
        await update(client, [PLANTED, OTHER])
        collects = {"prompt": PROMPT, "n": 3, "max_tokens": 3, "collect_trajectory": True, "seed": 1}
        ids = (await client.post("/v1/completions", json=collects)).json()["trajectory_ids"]
        for at, each in enumerate(ids):
            await client.post("/v1/training/feedback", json={"trajectory_id": each, "score": at})
        assert (await client.post("/v1/training/update", json={}, timeout=60)).json()["status"] == "published"
        before = (await client.get(WHY)).json()["updates"][0]
        assert (before["trajectories"], before["forgotten"]) == (3, 0)
        await client.post("/v1/training/forget", json={"trajectory_ids": [ids[0]]}, timeout=60)
        while (card := (await client.get("/v1/training/forget")).json())["state"] in ("rebuilding", "removing"):
            await asyncio.sleep(0.05)
        assert card["state"] == "done"
        found = (await client.get(WHY, params={"update": before["number"]})).json()
        assert found["updates_total"] == 2
        (after,) = found["updates"]
        assert (after["trajectories"], after["forgotten"]) == (2, 1)
        assert {sample["trajectory_id"] for sample in after["samples"]} == {*ids[1:]}
