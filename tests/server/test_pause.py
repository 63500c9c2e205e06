"""`/pause`, `/resume`, `/is_paused`, `/reset_prefix_cache`, `/server_info`: what they ask of the engine, and say."""

import asyncio

import httpx
import pytest
from server.asking import fault, refusal
from server.fakes import CARD

from mlx_parallm import __version__
from mlx_parallm.core.device import PauseMode
from mlx_parallm.errors import EngineDeadError

COMPLETION = {"prompt": "x"}


async def is_paused(client):
    return (await client.get("/is_paused")).json()


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", PauseMode.ABORT),
        ("?mode=abort&clear_cache=false", PauseMode.ABORT),
        ("?mode=wait", PauseMode.WAIT),
        ("?wait_for_inflight_requests=true", PauseMode.WAIT),
        ("?mode=keep", PauseMode.KEEP),
    ],
)
async def test_pause_and_resume(client, engine, metric, query, mode):
    assert await is_paused(client) == {"is_paused": False}
    paused = await client.post(f"/pause{query}")
    assert (paused.status_code, paused.json(), engine.pauses) == (200, {"status": "paused"}, [mode])
    assert await is_paused(client) == {"is_paused": True}
    assert await metric(client, "mlx_parallm_engine_paused") == 1
    assert (await client.get("/debug/state")).json()["server"]["paused"] is True
    for path in ("/health", "/ready"):
        assert (await client.get(path)).status_code == 200, "requests are taken, and wait"
    resumed = await client.post("/resume")
    assert (resumed.status_code, resumed.json()) == (200, {"status": "resumed"})
    assert await is_paused(client) == {"is_paused": False}
    assert await metric(client, "mlx_parallm_engine_paused") == 0


@pytest.mark.parametrize(
    ("query", "param"),
    [("mode=stop", "mode"), ("mod=keep", "mod"), ("mode=", "mode"), ("clear_cache=x", "clear_cache")],
)
async def test_what_is_not_known_pauses_nothing(client, engine, query, param):
    await refusal(client.post(f"/pause?{query}"), 400, param=param)
    assert not engine.called.is_set()


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache"])
async def test_a_dead_engine_is_told(client, engine, path):
    engine.call_error = EngineDeadError("/home/me")
    response = await client.post(path)
    assert (response.status_code, fault(response)["code"]) == (503, "engine_dead")
    assert "/home" not in response.text


async def test_a_drain_ends_a_pause_so_that_what_it_holds_can_finish(serving, engine):
    engine.pause_before = 2
    async with serving(shutdown_timeout=60) as server, httpx.AsyncClient(base_url=server.url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await engine.paused.wait()
        await client.post("/pause?mode=keep")
        resume = engine.resume

        async def resumed():
            await resume()
            engine.go_on.set()

        engine.resume = resumed
        server.uvicorn.begin_drain()
        assert (await asyncio.wait_for(request, 30)).status_code == 200
        await asyncio.wait_for(asyncio.shield(server.stopped), 30)
    assert engine.state["paused"] is False


@pytest.mark.parametrize(
    ("query", "cached"),
    [
        ("", 0),
        ("?clear_cache=false", 100),
        ("?mode=wait", 0),
        ("?mode=wait&clear_cache=false", 100),
        ("?mode=keep", 100),
        ("?mode=keep&clear_cache=true", 100),
    ],
)
async def test_a_pause_forgets_cached_prefixes_unless_told_not_to(client, engine, query, cached):
    assert (await client.post(f"/pause{query}")).status_code == 200
    assert engine.cached == cached


async def test_the_prefix_cache_is_reset(client, engine):
    for query in ("", "?reset_running_requests=false", "?reset_external=true"):
        engine.cached = 128
        response = await client.post(f"/reset_prefix_cache{query}")
        assert (response.status_code, response.json()) == (200, {"status": "success", "tokens": 128})
        assert (engine.cached, engine.files_removed) == (0, "external" in query)
    assert (await client.post("/reset_prefix_cache")).json() == {"status": "success", "tokens": 0}


@pytest.mark.parametrize("param", ["reset_running_requests", "reset_all"])
async def test_a_reset_of_more_than_the_cache_is_refused(client, engine, param):
    await refusal(client.post(f"/reset_prefix_cache?{param}=true"), 400, param=param)
    assert engine.cached == 100


async def test_server_info_tells_what_fits_and_no_secret(make_client, engine, adapters):
    client = make_client(api_key="sk-secret", max_batch_size=7, max_queued=5)
    response = await client.get("/server_info", headers={"authorization": "Bearer sk-secret"})
    info = response.json()
    assert (info["version"], info["inference"], info["training"]) == (__version__, True, True)
    assert info["versions"].keys() >= {"python", "fastapi"}
    assert (info["model"]["name"], info["model"]["context_length"]) == (CARD.name, CARD.context_length)
    assert (info["limits"]["max_batch_size"], info["limits"]["max_queued"]) == (7, 5)
    assert (info["limits"]["kv_cache_bytes"], info["limits"]["adapter_slots"]) == (40, 4)
    assert "secret" not in response.text
