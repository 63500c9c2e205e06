"""What a scrape says of adapters."""

import asyncio

import pytest

from mlx_parallm.core import AdapterStats

URL = "/v1/completions"


@pytest.fixture
def math(adapters):
    return adapters.publish("math")


async def exposition(client):
    return (await client.get("/metrics")).text


async def test_the_banks_state(client, adapters):
    adapters.state = AdapterStats(
        slots=8,
        slots_used=3,
        slots_pinned=2,
        bank_bytes=4096,
        running=("code", "math"),
        waiting=("math",),
        swaps_total=5,
        staged_total=6,
        evicted_total=7,
        checkpoint_saves_total=9,
        flip_s_last=0.25,
        flip_s_max=0.5,
        stage_s_last=1.5,
    )
    text = await exposition(client)
    for kind, name, value in (
        ("counter", "lora_swaps_total", 5),
        ("counter", "lora_staged_total", 6),
        ("counter", "lora_evicted_total", 7),
        ("counter", "checkpoint_saves_total", 9),
        ("gauge", "lora_slots", 8),
        ("gauge", "lora_slots_used", 3),
        ("gauge", "lora_slots_pinned", 2),
        ("gauge", "lora_bank_bytes", 4096),
        ("gauge", "lora_flip_seconds_last", 0.25),
        ("gauge", "lora_flip_seconds_max", 0.5),
        ("gauge", "lora_stage_seconds_last", 1.5),
    ):
        assert f"# TYPE mlx_parallm_{name} {kind}\nmlx_parallm_{name} {float(value)}\n" in text
    names = 'max_lora="8",running_lora_adapters="code,math",waiting_lora_adapters="math"'
    assert f"mlx_parallm_lora_requests_info{{{names}}} " in text


async def test_what_each_version_served(client, engine, adapters, metric, math):
    for body in ({"model": "math"}, {"model": "math", "n": 2}, {}):
        await client.post(URL, json={"prompt": "xyz", "max_tokens": 4, **body})
    engine.fail_before, engine.error = 2, RuntimeError("x")
    await client.post(URL, json={"prompt": "xyz", "model": "math"})
    text = await exposition(client)
    for line in (
        "# TYPE mlx_parallm_adapter_requests_total counter",
        'mlx_parallm_adapter_requests_total{adapter="math",version="1"} 3.0',
        'mlx_parallm_adapter_requests_total{adapter="base",version="0"} 1.0',
        'mlx_parallm_adapter_prompt_tokens_total{adapter="math",version="1"} 6.0',
        'mlx_parallm_adapter_prompt_tokens_total{adapter="base",version="0"} 3.0',
        'mlx_parallm_adapter_generation_tokens_total{adapter="math",version="1"} 14.0',
        'mlx_parallm_adapter_generation_tokens_total{adapter="base",version="0"} 4.0',
        "# TYPE mlx_parallm_adapter_request_latency_seconds summary",
        'mlx_parallm_adapter_request_latency_seconds_count{adapter="math",version="1"} 2.0',
        'mlx_parallm_adapter_request_latency_seconds_count{adapter="base",version="0"} 1.0',
    ):
        assert f"{line}\n" in text, line
    seconds = 'mlx_parallm_adapter_request_latency_seconds_sum{adapter="math",version="1"}'
    assert await metric(client, seconds) == pytest.approx(0.8)


async def test_versions_that_are_gone_lose_their_series(client, adapters):
    for _ in range(50):
        ref = adapters.publish("math")
        await client.post(URL, json={"prompt": "x", "model": "math"})
        await client.post(URL, json={"prompt": "x"})
        for old in [known for known in adapters.known if known != ref]:
            del adapters.known[old]
    text = await exposition(client)
    assert text.count("mlx_parallm_adapter_requests_total{") == 2
    assert 'mlx_parallm_adapter_requests_total{adapter="math",version="50"} 1.0\n' in text
    assert 'mlx_parallm_adapter_requests_total{adapter="base",version="0"} 50.0\n' in text


async def test_tallies_are_dropped_though_nobody_scrapes(client, adapters):
    for _ in range(50):
        ref = adapters.publish("math")
        await client.post(URL, json={"prompt": "x", "model": "math"})
        for old in [known for known in adapters.known if known != ref]:
            del adapters.known[old]
    assert ref.version == 50
    assert len(client.app.state.services.metrics.adapters._tallies) <= 2


async def test_a_version_unloaded_in_mid_request_does_not_come_back(client, engine, adapters, math):
    engine.pause_before = 2
    request = asyncio.create_task(client.post(URL, json={"prompt": "x", "model": "math"}))
    await engine.paused.wait()
    del adapters.known[math]
    assert 'adapter="math"' not in await exposition(client)
    engine.go_on.set()
    assert (await request).status_code == 200
    assert 'adapter="math"' not in await exposition(client)
