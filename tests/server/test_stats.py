"""`/v1/stats`: what the dashboard asks for every second."""

import time
from collections import Counter

import pytest
from server.asking import refusal
from server.keys import key_file

from mlx_parallm.engine.figures import NO_TIME, DeviceSeconds, EngineStats
from mlx_parallm.server.metrics import MOST_VALUES, WINDOW_S, RecentGrowth, RecentValues

ASK = {"prompt": "x", "max_tokens": 4}


def snapshot(at, device=NO_TIME, tokens=0, **fields):
    fields |= {"taken_at": at, "device_seconds": device, "generation_tokens_total": tokens}
    return EngineStats(alive=True, ready=True, **fields)


def test_recent_values_are_those_of_the_last_minute():
    clock = [0.0]
    values = RecentValues(lambda: clock[0])
    values.add(3.0)
    clock[0] = WINDOW_S
    values.add(1.0)
    assert values.ranked() == [1.0, 3.0]
    clock[0] += 1
    assert values.ranked() == [1.0]
    for value in range(MOST_VALUES + 5):
        values.add(float(value))
    assert len(values.ranked()) == MOST_VALUES


async def test_a_server_that_nobody_has_asked(client):
    stats = (await client.get("/v1/stats")).json()
    assert stats["latency"] == {"first_token": None, "between_tokens": None}
    assert stats["intervals"] == []
    assert stats["queue"] == {"running": 3, "rows": 128, "waiting": 0, "held": 0, "limit": 640}
    assert stats["caller"] == {"name": "", "role": "admin", "required": False}
    assert stats["models"] == [{"name": "tiny/byte-model", "state": "loaded"}]
    assert (stats["state"], stats["memory"]["budget"]) == ("serving", 40)


async def test_latencies_are_of_the_requests_of_the_last_minute(client, engine):
    engine.text = "abcd"
    for _ in range(3):
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    latency = (await client.get("/v1/stats")).json()["latency"]
    assert (latency["first_token"]["count"], latency["between_tokens"]["count"]) == (3, 9)
    for values in latency.values():
        assert 0 <= values["p50"] <= values["p95"] <= values["p99"]


async def test_memory_by_what_holds_it(client, engine):
    held = {"weights": 1, "rows": 2, "cached_prefixes": 3, "free_blocks": 4, "adapters": 5}
    engine.state["memory_bytes"] = held | {"optimizer": 6, "micro_step": 7}
    assert (await client.get("/v1/stats")).json()["memory"] == {
        "weights": 1,
        "budget": 40,
        "rows": 2,
        "cached_prefixes": 3,
        "free_blocks": 4,
        "adapters": 5,
        "training": 13,
    }


async def test_intervals_after_the_last_one_that_the_client_has(client, engine):
    history = client.app.state.services.metrics.history
    for second in range(4):
        history.add(snapshot(time.monotonic() + second, DeviceSeconds(decode=second / 2), tokens=10 * second))
    everything = (await client.get("/v1/stats")).json()["intervals"]
    assert [interval["number"] for interval in everything] == [1, 2, 3]
    assert {interval["generated_tokens"] for interval in everything} == {10}
    assert {interval["decode"] for interval in everything} == {0.5}
    later = (await client.get("/v1/stats", params={"after": 2})).json()["intervals"]
    assert later == everything[2:]


@pytest.mark.parametrize("after", ["-1", "x", "1e9", str(2**31)])
async def test_a_bad_number_is_refused_by_name(client, after):
    await refusal(client.get("/v1/stats", params={"after": after}), 400, param="after")


async def test_training_and_its_share(client):
    stats = (await client.get("/v1/stats")).json()
    assert stats["training"]["target"] == 0.12
    (adapter,) = stats["training"]["adapters"]
    assert (adapter["name"], adapter["last_update"]) == ("policy", None)


async def test_the_states_of_the_server(client, engine):
    async def state():
        return (await client.get("/v1/stats")).json()["state"]

    services = client.app.state.services
    engine.state["paused"] = True
    assert await state() == "paused"
    services.lifecycle.asleep = True
    assert await state() == "asleep"
    services.lifecycle.begin_drain()
    assert await state() == "draining"
    engine.state["alive"] = False
    assert await state() == "dead"


async def test_who_asks_for_how_much(make_client, tmp_path, engine, adapters):
    engine.text = "abcd"
    adapters.publish("tone")
    file, sent = key_file(tmp_path, boss="admin", acme="inference", globex="inference")
    client = make_client(keys_file=file)
    for key, model, times in (("acme", "tone", 3), ("globex", "base", 1), ("globex", "tone", 1)):
        for _ in range(times):
            answer = await client.post("/v1/completions", json=ASK | {"model": model}, headers=sent[key])
            assert answer.status_code == 200
    await client.post("/v1/completions", json={"prompt": 1}, headers=sent["acme"])

    async def load(key):
        return (await client.get("/v1/stats", headers=sent[key])).json()["load"]

    def line(name, requests):
        return {"name": name, "running": 0, "requests": requests, "generated_tokens": 4 * requests}

    every = await load("boss")
    assert every["keys"] == [line("acme", 3), line("globex", 2)]
    assert every["adapters"] == [line("tone", 4), line("base", 1)]
    assert every["errors"] == {"400": 1}
    assert (await load("acme"))["keys"] == [line("acme", 3)], "names of other keys are for an admin key"


def test_growth_is_that_of_the_last_minute():
    clock, of = [0.0], ("key", "acme", "requests")
    growth = RecentGrowth(lambda: clock[0])
    assert growth.until(Counter({of: 3})) == {of: 3}, "all since the server started"
    for second in range(200):
        clock[0] = float(second)
        growth.add(Counter({of: 2 * second}))
    assert growth.until(Counter({of: 2 * 199})) == {of: 2 * WINDOW_S}
    assert growth.until(Counter()) == {}, "a key that was removed"


async def test_its_own_command_is_not_for_every_role(make_client, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_parallm.server.api.stats.command_line", lambda: "uv run mlx_parallm_serve")
    file, sent = key_file(tmp_path, reader="inference", teacher="train")
    client = make_client(keys_file=file)
    said = [(await client.get("/v1/stats", headers=sent[key])).json()["command"] for key in ("reader", "teacher")]
    assert said == ["", "uv run mlx_parallm_serve"], "paths are for keys that may name them"
