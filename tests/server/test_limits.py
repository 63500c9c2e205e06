"""The bounded queue, and the drain."""

import asyncio

import pytest
from server.asking import eventually, fault, refusal

URL = "/v1/completions"


async def test_a_burst_beyond_the_queue_gets_429_and_the_admitted_finish(make_client, engine):
    client = make_client(max_batch_size=2, max_queued=2)
    engine.pause_before = 0
    burst = [asyncio.create_task(client.post(URL, json={"prompt": "x"})) for _ in range(10)]
    while sum(task.done() for task in burst) < 6 or len(engine.live) < 4:
        await asyncio.sleep(0.01)
    refused = [task.result() for task in burst if task.done()]
    assert len(refused) == 6
    for response in refused:
        assert (response.status_code, fault(response)["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
    engine.go_on.set()
    answers = await asyncio.gather(*burst)
    assert [answer.status_code for answer in answers].count(200) == 4
    assert client.app.state.services.gate.held == 0
    assert (await client.post(URL, json={"prompt": "x"})).status_code == 200


async def test_a_request_that_never_fits_is_told_so(make_client, engine):
    """With 429, a client would try again for ever."""
    client = make_client(max_batch_size=2, max_queued=2)
    error = await refusal(client.post(URL, json={"prompt": "x", "n": 5}), 400, param="n")
    assert "needs 5 places in the queue, and it has 4" in error["message"]
    assert not engine.requests


async def test_draining_refuses_new_requests_and_finishes_old_ones(client, engine):
    engine.pause_before = 1
    old = asyncio.create_task(client.post(URL, json={"prompt": "x"}))
    await engine.paused.wait()
    assert (await client.get("/ready")).status_code == 200
    client.app.state.services.lifecycle.begin_drain()
    for response in (await client.post(URL, json={"prompt": "x"}), await client.get("/ready")):
        assert (response.status_code, fault(response)["code"]) == (503, "draining")
        assert "retry-after" in response.headers
    assert (await client.get("/health")).status_code == 200
    engine.go_on.set()
    assert (await old).json()["choices"][0]["text"] == "Hi ä!"


async def test_when_the_drain_is_over_requests_end_with_an_error(client, engine):
    engine.pause_before = 1
    whole = asyncio.create_task(client.post(URL, json={"prompt": "x"}))
    stream = asyncio.create_task(client.post(URL, json={"prompt": "x", "stream": True}))
    await eventually(lambda: len(engine.live) >= 2)
    client.app.state.services.lifecycle.expire()
    assert ((await whole).status_code, fault(await whole)["code"]) == (503, "draining")
    assert '"code":"draining"' in (await stream).text
    assert (await stream).text.endswith("data: [DONE]\n\n")
    assert (engine.live, engine.aborted) == (set(), 2)


TOO_LONG = {
    "/v1/completions": {"prompt": "x" * 65, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 65}]},
    "/v1/responses": {"input": "x" * 65},
    "/tokenize": {"prompt": "x" * 65},
    "/detokenize": {"tokens": [1] * 65},
}


@pytest.mark.parametrize(("path", "body"), TOO_LONG.items(), ids=TOO_LONG)
async def test_what_cannot_fit_the_context_is_refused(client, engine, path, body):
    await refusal(client.post(path, json=body), 400, code="context_length_exceeded")
    assert not engine.requests
