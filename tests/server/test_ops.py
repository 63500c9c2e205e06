"""The routes around generation: models, tokenizer, probes, metrics, state, the OpenAPI document."""

import pytest
from server.asking import refusal

from mlx_parallm import __version__
from mlx_parallm.errors import StepFailedError


async def test_tokenize_and_back(client):
    tokens = (await client.post("/tokenize", json={"prompt": "ä", "add_special_tokens": False})).json()
    assert tokens == {"tokens": [195, 164], "count": 2, "max_model_len": 64}
    assert (await client.post("/detokenize", json={"tokens": [195, 164]})).json() == {"prompt": "ä"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert bytes(chat["tokens"]) == b"u:x\na:"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_tokenizer_routes_refuse_by_name(client, path, body, param):
    await refusal(client.post(path, json=body), 400, param=param)


async def test_probes_and_version(client, engine):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/version")).json() == {"version": __version__}
    engine.state["ready"] = False
    assert ((await client.get("/ready")).status_code, (await client.get("/health")).status_code) == (503, 200)


async def test_the_time_to_the_first_token_counts_when_that_comes(client, engine, metric):
    """An overloaded server whose clients give up would look fast otherwise."""
    engine.fail_before, engine.error = 2, StepFailedError("gone")
    assert (await client.post("/v1/completions", json={"prompt": "xyz", "max_tokens": 4})).status_code == 500
    assert await metric(client, "mlx_parallm_time_to_first_token_seconds_count") == 1
    assert await metric(client, "mlx_parallm_e2e_request_latency_seconds_count") == 0


async def test_responses_are_counted_by_status(client, metric):
    await client.get("/nope")
    await client.get("/health", headers={"host": "evil.example"})
    assert await metric(client, 'mlx_parallm_http_responses_total{status="404"}') == 1
    assert await metric(client, 'mlx_parallm_http_responses_total{status="403"}') == 1
