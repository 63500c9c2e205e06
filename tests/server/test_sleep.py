"""`/sleep`, `/wake_up`, `/is_sleeping`: requests are kept away, and what only sampling holds is given back."""

import asyncio

import pytest
from server.asking import fault, refusal

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
ASLEEP, AWAKE = {"is_sleeping": True}, {"is_sleeping": False}


async def is_sleeping(client):
    response = await client.get("/is_sleeping")
    assert response.status_code == 200
    return response.json()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def running(client, engine):
    """A request that stands still between two tokens."""
    engine.pause_before = 2
    request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
    await engine.paused.wait()
    return request


async def falling(client):
    """A call of `/sleep` that waits for what is under way."""
    call = asyncio.create_task(client.post("/sleep"))
    while (await is_sleeping(client)) == AWAKE:
        await asyncio.sleep(0)
    await settle()
    assert not call.done()
    return call


async def test_sleep_and_wake(client, engine):
    assert await is_sleeping(client) == AWAKE
    slept = await client.post("/sleep")
    assert (slept.status_code, slept.json()) == (200, ASLEEP)
    assert (engine.slept, await is_sleeping(client)) == (1, ASLEEP)
    woken = await client.post("/wake_up")
    assert (woken.status_code, woken.json()) == (200, AWAKE)
    assert await is_sleeping(client) == AWAKE
    for path, body in BODIES.items():
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_asleep_nothing_samples(client, engine, adapters, path, stream):
    await client.post("/sleep")
    for fields in ({}, {"collect_trajectory": True}):
        response = await client.post(path, json={**BODIES[path], **fields, "stream": stream})
        error = fault(response)
        assert (response.status_code, error["code"], error["type"]) == (503, "asleep", "server_error")
        assert "/wake_up" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    assert not engine.requests
    assert not adapters.asked


async def test_asleep_the_rest_goes_on(client):
    await client.post("/sleep")
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, fault(ready)["code"]) == (503, "asleep")
    assert (await client.get("/debug/state")).json()["server"]["asleep"] is True
    for path in ("/v1/models", "/v1/adapters", "/v1/training/status", "/v1/training/schedule", "/metrics"):
        assert (await client.get(path)).status_code == 200, path
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    load = {"lora_name": "math", "lora_path": "x"}
    assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
    assert (await client.post("/v1/training/update")).status_code == 200
    await client.post("/wake_up")
    assert (await client.get("/ready")).status_code == 200


async def test_sleep_waits_for_requests_under_way_and_takes_no_more(client, engine):
    request = await running(client, engine)
    sleep = await falling(client)
    refused = await client.post("/v1/completions", json={"prompt": "x"})
    assert fault(refused)["code"] == "asleep"
    assert engine.slept == 0
    engine.go_on.set()
    assert (await request).status_code == 200
    assert (await sleep).json() == ASLEEP
    assert (engine.slept, len(engine.requests)) == (1, 1)


async def test_woken_before_it_slept_it_gives_nothing_back(client, engine):
    request = await running(client, engine)
    sleep = await falling(client)
    assert (await client.post("/wake_up")).json() == AWAKE
    assert (await asyncio.wait_for(sleep, 30)).json() == AWAKE
    engine.go_on.set()
    assert (await request).status_code == 200
    assert (engine.slept, await is_sleeping(client)) == (0, AWAKE)
    assert (await client.post("/sleep")).json() == ASLEEP
    assert engine.slept == 1


@pytest.mark.parametrize(("level", "banks"), [("1", 0), ("2", 1)])
async def test_level_2_gives_the_bank_back_too(client, engine, level, banks):
    assert (await client.post("/sleep", params={"level": level})).json() == ASLEEP
    assert (engine.slept, engine.banks) == (1, banks)


@pytest.mark.parametrize(
    ("tags", "said"),
    [("", AWAKE), ("?tags=kv_cache", AWAKE), ("?tags=weights&tags=kv_cache", AWAKE), ("?tags=weights", ASLEEP)],
)
async def test_weights_never_sleep_so_waking_them_wakes_nothing(client, tags, said):
    await client.post("/sleep")
    assert (await client.post(f"/wake_up{tags}")).json() == said
    assert await is_sleeping(client) == said


@pytest.mark.parametrize(
    ("path", "param"), [("/sleep?mode=abort", "mode"), ("/wake_up?tags=bank", "0"), ("/wake_up?tag=kv_cache", "tag")]
)
async def test_what_is_not_known_is_refused_by_name(client, engine, path, param):
    await client.post("/sleep")
    engine.called.clear()
    await refusal(client.post(path), 400, param=param)
    assert not engine.called.is_set()
    assert await is_sleeping(client) == ASLEEP


async def test_what_a_pause_holds_would_keep_it_awake_for_ever(client, engine):
    request = await running(client, engine)
    await client.post("/pause?mode=keep")
    response = await client.post("/sleep")
    assert (response.status_code, fault(response)["code"]) == (409, "conflict")
    assert "/resume" in response.text
    assert await is_sleeping(client) == AWAKE
    engine.go_on.set()
    await request
    assert (await client.post("/sleep")).json() == ASLEEP, "a pause alone does not matter"
