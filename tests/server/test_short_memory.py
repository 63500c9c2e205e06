"""While the machine is short of memory, new requests are refused in the words of each API, and people see why."""

from __future__ import annotations

import asyncio
import re

import pytest
from server.asking import refusal

from mlx_parallm.core.machine import MachineState, Relief

SHORT = MachineState(15 << 30, 14 << 30, Relief.REQUESTS, "the system's memory pressure is critical", "memory is short")
CHAT = {"messages": [{"role": "user", "content": "x"}]}
OPENAI = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/generate": {"prompts": ["x"]},
}


@pytest.fixture
def short(engine):
    engine.state["machine"] = SHORT


SAID = dict.fromkeys(OPENAI, '"code":"memory_pressure"') | {
    "/v1/messages": '"type":"overloaded_error"',
    "/api/chat": '{"error":"',
}
BODIES = OPENAI | {"/v1/messages": {**CHAT, "max_tokens": 4}, "/api/chat": {**CHAT, "model": "tiny/byte-model"}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_requests_are_refused_in_the_words_of_each_api(client, engine, short, path, stream):
    streams = {"stream": True} if stream and path.startswith(("/v1/c", "/v1/r", "/v1/m", "/api")) else {}
    response = await client.post(path, json={**BODIES[path], **streams})
    assert (response.status_code, response.headers["retry-after"]) == (503, "10")
    assert "x-should-retry" not in response.headers, "OpenAI's clients try again"
    assert SAID[path] in response.text
    assert "memory pressure is critical" in response.text
    assert not engine.requests


@pytest.mark.parametrize("relief", [Relief.NONE, Relief.PREFIXES, Relief.ROLLOUTS])
async def test_no_other_step_refuses_anything(client, engine, relief):
    engine.state["machine"] = MachineState(1, 2, relief, "of pressure")
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert (await client.get("/ready")).status_code == 200


async def test_a_request_that_runs_already_is_not_ended(client, engine):
    engine.pause_before = 2
    request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
    await engine.paused.wait()
    engine.state["machine"] = SHORT
    engine.go_on.set()
    assert (await request).status_code == 200


async def test_probes_metrics_and_the_dashboard_say_so(client, short):
    await refusal(client.get("/ready"), 503, code="memory_pressure")
    notice = (
        "Memory is short (the system's memory pressure is critical): no cached prefixes are kept, training waits, and "
        "new requests are refused."
    )
    assert (await client.get("/health")).json() == {"status": "ok", "notices": [notice]}
    assert (await client.get("/v1/stats")).json()["notices"] == [notice, "Training waits: memory is short."]
    metrics = (await client.get("/metrics")).text
    assert "\nmlx_parallm_memory_relief 3.0\n" in metrics
    footprint = re.search(r"^mlx_parallm_process_footprint_bytes (\S+)$", metrics, re.MULTILINE)
    assert float(footprint[1]) == 15 << 30
    assert "\nmlx_parallm_training_held 1.0\n" in metrics
