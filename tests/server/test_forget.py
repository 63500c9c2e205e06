"""`/v1/training/forget` over HTTP. What becomes of an adapter is in `tests/extras/forgetting/test_forgetting.py`."""

import pytest
from server.asking import refusal

from mlx_parallm.extras.forgetting.forgotten import ForgetSpec

FORGET = "/v1/training/forget"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"key": "alice", "since": 1}, None),
        ({"key": ""}, "key"),
        ({"trajectory_ids": []}, "trajectory_ids"),
        ({"since": -1}, "since"),
        ({"names": ["alice"]}, "names"),
    ],
)
async def test_what_does_not_say_one_thing_is_refused(client, forgetting, body, param):
    await refusal(client.post(FORGET, json=body), 400, param=param)
    assert not forgetting.asked


async def test_nothing_is_forgotten_by_a_dry_run(client, forgetting):
    answer = (await client.post(FORGET, json={"key": "alice", "dry_run": True})).json()
    assert answer == {"what": "the key alice", "adapters": [], "remove_checkpoints": "all"}
    assert not forgetting.asked


async def test_a_key_is_forgotten(client, forgetting):
    answer = (await client.post(FORGET, json={"key": "alice", "from_scratch": True, "ignore_floor": True})).json()
    assert (answer["state"], answer["what"]) == ("done", "the key alice")
    assert forgetting.asked == [(ForgetSpec(key="alice", from_scratch=True, asked_at=0.0), True)]
    assert (await client.get(FORGET)).json() == answer
