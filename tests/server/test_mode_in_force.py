"""`/server_info` and `/debug/state` name the mode that is in force."""

from dataclasses import replace

import pytest


async def told(client):
    info, state = [(await client.get(path)).json() for path in ("/server_info", "/debug/state")]
    for name in ("mode", "paused", "asleep", "draining"):
        assert info[name] == state["server"][name]
    return info


async def test_a_server_that_does_not_train(client, training):
    training.state["policy"] = replace(training.state["policy"], enabled=False)
    assert (await told(client))["mode"] == "inference_only"


async def test_a_server_that_only_trains(make_client):
    assert (await told(make_client(inference=False)))["mode"] == "training_only"


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ({"mode": "training_priority"}, "training_priority"),
        ({"training_time_share": 0.3}, "custom"),
        ({"max_decode_stall_ms": 50}, "inference_and_training"),
    ],
    ids=str,
)
async def test_a_change_of_the_schedule_is_told(client, body, mode):
    assert (await told(client))["mode"] == "inference_and_training"
    assert (await client.post("/v1/training/schedule", json=body)).status_code == 200
    assert (await told(client))["mode"] == mode


async def test_pause_sleep_and_drain_are_told(client):
    names = ("paused", "asleep", "draining")
    assert [(await told(client))[name] for name in names] == [False, False, False]
    await client.post("/pause")
    assert [(await told(client))[name] for name in names] == [True, False, False]
    await client.post("/resume")
    await client.post("/sleep")
    assert [(await told(client))[name] for name in names] == [False, True, False]
    client.app.state.services.lifecycle.begin_drain()
    assert [(await told(client))[name] for name in names] == [False, True, True]
