"""Servers that do not train, or only train; `/server_info` and `/debug/state` show the mode in force."""

import pytest

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
async def test_without_training_its_routes_say_so(client, fault, path):
    response = await client.post(path, json=CHANGES[path])
    error = fault(response)
    assert (response.status_code, error["code"]) == (409, "training_disabled")
    assert "--enable-rl-training" in error["message"]
    assert response.headers["x-should-retry"] == "false"


@without_training
async def test_without_training_there_is_no_schedule(client, engine, fault):
    response = await client.get("/v1/training/schedule")
    assert (response.status_code, fault(response)["code"]) == (409, "training_disabled")
    await client.post("/v1/training/schedule", json={"training_time_share": 0.5})
    assert not engine.schedules


@without_training
async def test_without_training_status_and_debug_answer(client):
    status = (await client.get("/v1/training/status")).json()
    assert (status["training_enabled"], status["state"], status["lora_adapter"]) == (False, "disabled", None)
    assert (await client.get("/v1/training/status?lora_adapter=x")).json() == status
    assert (await client.get("/debug/training")).json() == {"training_enabled": False, "adapters": []}
    assert (await client.get("/debug/trajectories")).json() == {"object": "list", "data": []}


@without_training
@pytest.mark.parametrize("path", BODIES)
async def test_without_training_nothing_is_collected(client, engine, fault, path):
    response = await client.post(path, json={**BODIES[path], "collect_trajectory": True})
    error = fault(response)
    assert (response.status_code, error["code"]) == (409, "training_disabled")
    assert error["param"] == "collect_trajectory"
    assert not engine.requests
    assert (await client.post(path, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_a_server_that_only_trains_refuses_generation(make_client, engine, adapters, fault, path, stream):
    client = make_client(mode="training_only")
    for fields in ({}, {"collect_trajectory": True}):
        response = await client.post(path, json={**BODIES[path], **fields, "stream": stream})
        assert (response.status_code, fault(response)["code"]) == (503, "inference_disabled")
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    assert not engine.requests
    assert not adapters.asked


async def test_a_server_that_only_trains_is_healthy_and_not_ready(make_client, fault):
    client = make_client(mode="training_only")
    ready = await client.get("/ready")
    assert (ready.status_code, fault(ready)["code"]) == (503, "inference_disabled")
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/training/status")).json()["training_enabled"] is True
    assert (await client.post("/v1/training/update")).status_code == 200


async def test_of_several_reasons_a_server_that_only_trains_says_the_one_that_lasts(make_client, engine, fault):
    client = make_client(mode="training_only")

    async def reasons():
        refused = await client.post("/v1/completions", json={"prompt": "x"}), await client.get("/ready")
        return [fault(answer)["code"] for answer in refused]

    assert (await client.post("/sleep")).json() == {"is_sleeping": True}
    assert engine.slept == 1
    assert await reasons() == ["inference_disabled"] * 2
    client.app.state.services.lifecycle.begin_drain()
    assert await reasons() == ["draining"] * 2


async def state_of(client):
    info, state = [(await client.get(path)).json() for path in ("/server_info", "/debug/state")]
    for name in ("mode", "paused", "asleep", "draining"):
        assert info[name] == state["server"][name]
    return info


@without_training
async def test_the_mode_of_a_server_that_does_not_train(client):
    assert (await state_of(client))["mode"] == "inference_only"


async def test_the_mode_of_a_server_that_only_trains(make_client):
    assert (await state_of(make_client(mode="training_only")))["mode"] == "training_only"


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ({"mode": "training_priority"}, "training_priority"),
        ({"training_time_share": 0.3}, "custom"),
        ({"max_decode_stall_ms": 50}, "inference_and_training"),
    ],
    ids=str,
)
async def test_a_change_of_the_schedule_is_shown(client, body, mode):
    assert (await state_of(client))["mode"] == "inference_and_training"
    assert (await client.post("/v1/training/schedule", json=body)).status_code == 200
    assert (await state_of(client))["mode"] == mode


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
