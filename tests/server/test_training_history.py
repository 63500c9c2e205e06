"""`GET /v1/training/history`."""

import math

from server.asking import fault

from mlx_parallm.rl.status import TrainingEvent

URL = "/v1/training/history"
AT = 1_800_000_000.25
METRICS = {"loss": math.nan, "reward_mean": 0.5, "grad_norm": 2.0}
UPDATE = TrainingEvent("update", AT, {"adapter": "policy", "version": "policy@3", "step": 3, "metrics": METRICS}, "a-6")


async def test_the_events_with_the_metrics_that_are_wanted_and_where_the_stream_continues(client, training):
    training.past = (UPDATE, TrainingEvent("rollback", AT + 1, {"adapter": "policy", "version": "policy@2", "step": 2}))
    response = await client.get(URL, params={"metric": ["loss", "reward_mean"]})
    told = {"adapter": "policy", "version": "policy@3", "step": 3, "metrics": {"loss": None, "reward_mean": 0.5}}
    gone_back = {"adapter": "policy", "version": "policy@2", "step": 2}
    assert response.json() == {
        "object": "list",
        "lora_adapter": "policy",
        "data": [
            {"kind": "update", "at": "2027-01-15T08:00:00.250Z", "data": told},
            {"kind": "rollback", "at": "2027-01-15T08:00:01.250Z", "data": gone_back},
        ],
        "truncated": False,
        "last_event_id": "a-7",
    }


async def test_all_metrics_unless_some_are_named_and_as_many_events_as_asked_for(client, training):
    training.past = (UPDATE, UPDATE, UPDATE)
    answer = (await client.get(URL, params={"limit": 2})).json()
    assert answer["truncated"]
    assert [set(event["data"]["metrics"]) for event in answer["data"]] == [set(METRICS)] * 2


async def test_what_is_refused(client):
    error = fault(await client.get(URL, params={"lora_adapter": "nobody"}))
    assert (error["code"], error["param"]) == ("model_not_found", "lora_adapter")
    assert (await client.get(URL, params={"limit": 2001})).status_code == 400
    assert (await client.get(URL, params={"metric": ["x"] * 65})).status_code == 400
