"""What a client sees when the engine fails (case 23)."""

import pytest
from server.asking import fault

from mlx_parallm.errors import (
    DeviceMemoryError,
    EngineError,
    InvalidRequestError,
    QueueTimeoutError,
    StepFailedError,
)

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StepFailedError("/home/me/model.py: Unable to allocate 0x7f00"), 500, "step_failed"),
        (EngineError("/home/me"), 500, "engine_error"),
        (MemoryError("/home/me"), 500, "internal_error"),
        (InvalidRequestError("this request can never fit in the KV pool"), 400, None),
    ],
)
async def test_a_failed_request_is_an_error_and_the_next_one_works(client, engine, metric, error, status, code, caplog):
    engine.fail_before, engine.error = 2, error
    response = await client.post(URL, json={"prompt": "x", "n": 2})
    assert (response.status_code, fault(response)["code"]) == (status, code)
    assert ("/home" in response.text) == (status == 400 and "/home" in str(error))
    if type(error) is EngineError:
        assert "/home/me" in caplog.messages, "what the client is not told, the operator is"
    assert await metric(client, 'mlx_parallm_request_success_total{finished_reason="error"}') == 2
    engine.fail_before = None
    assert (await client.post(URL, json={"prompt": "x"})).status_code == 200
    assert client.app.state.services.gate.held == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(QueueTimeoutError("it waited 600 s"), "queue_timeout"), (DeviceMemoryError("no memory"), "out_of_memory")],
)
async def test_a_request_that_may_be_tried_again_says_when(client, engine, error, code):
    engine.fail_before, engine.error = 1, error
    response = await client.post(URL, json={"prompt": "x"})
    assert (response.status_code, fault(response)["code"]) == (503, code)
    assert int(response.headers["retry-after"]) >= 1


async def test_a_fault_of_our_own_is_a_500_without_a_trace(client):
    client.app.state.services.models.first.tokenizer.encode = lambda *_: 1 / 0
    response = await client.post(URL, json={"prompt": "x"})
    assert (response.status_code, fault(response)["code"]) == (500, "internal_error")
    assert "division" not in response.text
    assert client.app.state.services.gate.held == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_dead_engine_shows_in_health_and_takes_nothing(client, engine, stream):
    engine.state["alive"] = False
    for response in (
        await client.get("/health"),
        await client.post(URL, json={"prompt": "x", "stream": stream}),
    ):
        assert (response.status_code, fault(response)["code"]) == (503, "engine_dead")
    assert (await client.get("/ready")).status_code == 503


async def test_a_device_that_seems_to_hang_is_named_and_gets_nothing_new(client, engine, metric):
    engine.state["stuck"] = "The device thread seems to hang: a prefill has taken 301 s."
    for response in (
        await client.get("/health"),
        await client.get("/ready"),
        await client.post(URL, json={"prompt": "x"}),
    ):
        assert (response.status_code, fault(response)["code"]) == (503, "engine_dead")
        assert "a prefill has taken 301 s" in response.text
    stats = (await client.get("/v1/stats")).json()
    assert stats["notices"] == [engine.state["stuck"]]
    assert await metric(client, "mlx_parallm_engine_stuck") == 1
    engine.state["stuck"] = ""
    assert (await client.get("/health")).json() == {"status": "ok"}, "it has got on"
