"""Servers that do not train, or only train; `/server_info` and `/debug/state` show the mode in force."""

import pytest
from server.asking import fault, refusal

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
CHANGES = {
    "/v1/training/update": {},
    "/v1/training/start": {},
    "/v1/training/pause": {},
    "/v1/training/resume": {},
    "/v1/training/rollback": {},
    "/v1/training/feedback": {"trajectory_id": "x", "score": 1},
    "/v1/training/preference": {"trajectory_id": "x", "correction": "y"},
    "/v1/training/compare": {"candidate": "x"},
    "/v1/training/compare/stop": {},
    "/v1/training/reward_model": {"name": "x"},
    "/v1/training/average": {"adapters": ["x", "y"], "lora_adapter": "z"},
    "/v1/training/schedule": {"training_time_share": 0.5},
}


without_training = pytest.mark.parametrize("training", [None])


@without_training
@pytest.mark.parametrize("path", CHANGES)
async def test_without_training_its_routes_say_so(client, path):
    response = await client.post(path, json=CHANGES[path])
    error = fault(response)
    assert (response.status_code, error["code"]) == (409, "training_disabled")
    assert "--enable-rl-training" in error["message"]
    assert response.headers["x-should-retry"] == "false"


@without_training
async def test_without_training_status_and_debug_answer(client):
    status = (await client.get("/v1/training/status")).json()
    assert (status["training_enabled"], status["state"], status["lora_adapter"]) == (False, "disabled", None)
    assert (await client.get("/v1/training/status?lora_adapter=x")).json() == status
    assert (await state_of(client))["mode"] == "inference_only"
    assert (await client.get("/debug/training")).json() == {"training_enabled": False, "adapters": []}
    assert (await client.get("/debug/trajectories")).json() == {"object": "list", "data": []}


@without_training
@pytest.mark.parametrize("path", BODIES)
async def test_without_training_nothing_is_collected(client, engine, path):
    error = await refusal(
        client.post(path, json={**BODIES[path], "collect_trajectory": True}), 409, code="training_disabled"
    )
    assert error["param"] == "collect_trajectory"
    assert not engine.requests
    assert (await client.post(path, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_a_server_that_only_trains_refuses_generation(make_client, engine, adapters, path, stream):
    client = make_client(mode="training_only")
    for fields in ({}, {"collect_trajectory": True}):
        response = await client.post(path, json={**BODIES[path], **fields, "stream": stream})
        assert (response.status_code, fault(response)["code"]) == (503, "inference_disabled")
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    assert not engine.requests
    assert not adapters.asked


async def test_a_server_that_only_trains_is_healthy_and_not_ready(make_client):
    client = make_client(mode="training_only")
    await refusal(client.get("/ready"), 503, code="inference_disabled")
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/training/status")).json()["training_enabled"] is True
    assert (await client.post("/v1/training/update")).status_code == 200
    assert (await state_of(client))["mode"] == "training_only"


async def state_of(client):
    info, state = [(await client.get(path)).json() for path in ("/server_info", "/debug/state")]
    for name in ("mode", "paused", "asleep", "draining"):
        assert info[name] == state["server"][name]
    return info


async def test_pause_sleep_and_drain_are_shown(client):
    names = ("paused", "asleep", "draining")
    assert [(await state_of(client))[name] for name in names] == [False, False, False]
    await client.post("/pause")
    assert [(await state_of(client))[name] for name in names] == [True, False, False]
    await client.post("/resume")
    await client.post("/sleep")
    assert [(await state_of(client))[name] for name in names] == [False, True, False]
    client.app.state.services.lifecycle.begin_drain()
    assert [(await state_of(client))[name] for name in names] == [False, True, True]
