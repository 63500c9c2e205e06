"""Request ids, the line that each request leaves in the log, HEAD, and slashes at the end of paths."""

import asyncio
import json
import logging
import re

import httpx
import pytest

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import StepFailedError
from mlx_parallm.server import request_log

COMPLETIONS = "/v1/completions"
EVERY_LINE = {"time", "request_id", "method", "route", "status", "total_ms"}
GENERATION = {
    *("model", "adapter", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("queue_ms", "first_token_ms", "finish"),
}


@pytest.fixture
def lines(caplog):
    """`lines()` → the log's lines since the last call, parsed."""
    caplog.set_level(logging.INFO, logger="mlx_parallm.access")

    def read():
        said = [record.getMessage() for record in caplog.records if record.name == "mlx_parallm.access"]
        caplog.clear()
        assert not any("\n" in line for line in said)
        return [json.loads(line) for line in said]

    return read


async def test_a_generation_leaves_one_line(client, engine, adapters, lines):
    adapters.publish("math")
    engine.cached_tokens = 1
    body = {"prompt": "secret", "model": "math", "max_tokens": 3, "n": 2}
    response = await client.post(COMPLETIONS, json=body)
    (line,) = lines()
    assert set(line) == EVERY_LINE | GENERATION
    assert line["request_id"] == response.json()["id"] == response.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", COMPLETIONS, 200)
    assert (line["model"], line["adapter"]) == ("math", str(AdapterRef("math", 1)))
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (6, 1, 6)
    assert (line["queue_ms"], line["first_token_ms"], line["finish"]) == (100.0, 200.0, "length")
    assert line["total_ms"] > 0
    assert "secret" not in json.dumps(line)


async def test_the_lines_can_be_turned_off(make_client, lines):
    for access_log in (False, True):
        assert (await make_client(access_log=access_log).post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
        assert bool(lines()) is access_log


@pytest.mark.parametrize(
    ("ask", "route", "status", "error"),
    [
        (("POST", COMPLETIONS, {"prompt": 5}), COMPLETIONS, 400, "invalid_request_error"),
        (("POST", COMPLETIONS, {"prompt": "x", "model": "nope"}), COMPLETIONS, 404, "model_not_found"),
        (("POST", COMPLETIONS, {"prompt": "x" * 70}), COMPLETIONS, 400, "context_length_exceeded"),
        (("GET", "/nope", None), "/nope", 404, "not_found"),
        (("GET", COMPLETIONS, None), COMPLETIONS, 405, "method_not_allowed"),
        (("GET", "/v1/models/nope", None), "/v1/models/{name:path}", 404, "model_not_found"),
        (("GET", "/v1/training/status?lora_adapter=" + "x" * 500, None), "/v1/training/status", 404, "model_not_found"),
    ],
    ids=str,
)
async def test_a_refusal_leaves_one_line_and_has_an_id(client, lines, ask, route, status, error):
    method, url, body = ask
    response = await client.request(method, url, json=body)
    (line,) = lines()
    assert (line["route"], line["status"], line["error"]) == (route, status, error)
    assert response.status_code == status
    assert line["request_id"] == response.headers["x-request-id"]
    assert line.get("finish") is None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_generation_that_fails_midway(client, engine, lines, stream):
    engine.fail_before, engine.error = 2, StepFailedError("boom")
    await client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    (line,) = lines()
    assert (line["status"], line["finish"], line["error"]) == (200 if stream else 500, "error", "step_failed")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (1, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(serving, engine, lines, stream):
    engine.pause_before = 2
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x", "stream": stream}))
        await engine.paused.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        while not (said := lines()):
            await asyncio.sleep(0.01)
    assert (said[0]["status"], said[0]["finish"]) == (200 if stream else 499, "disconnect")
    assert (said[0]["completion_tokens"], round(said[0]["queue_ms"])) == (2, 100)


async def test_probes_are_quiet_unless_they_fail(client, engine, lines, caplog):
    for path in ("/health", "/ready", "/metrics"):
        await client.get(path)
    assert lines() == []
    engine.state["ready"] = False
    await client.get("/ready")
    (line,) = lines()
    assert (line["route"], line["status"]) == ("/ready", 503)
    caplog.set_level(logging.DEBUG, logger="mlx_parallm.access")
    await client.get("/health")
    assert lines()[0]["route"] == "/health"


async def test_ignored_fields_are_in_the_line_with_what_was_probably_meant(client, lines):
    await client.post(COMPLETIONS, json={"prompt": "x", "temperatur": 0, "num_ctx": 1})
    (line,) = lines()
    assert (line["ignored"], line["did_you_mean"]) == (["temperatur", "num_ctx"], {"temperatur": "temperature"})


async def test_a_clients_request_id_is_kept(client, engine, lines):
    answers = [
        await client.post(COMPLETIONS, json={"prompt": "x", "stream": stream}, headers={"X-Request-Id": "mine 1/2"})
        for stream in (True, False, False)
    ]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine 1/2"}
    assert len({request.request_id for request in engine.requests}) == 3
    said = lines()
    assert {line["request_id"] for line in said} == {"mine 1/2"}
    assert [line["engine_id"] for line in said] == [request.request_id for request in engine.requests]
    refused = await client.get("/nope", headers={"X-Request-Id": "mine"})
    assert refused.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("sent", [b"", b"x" * 129, b"\xc3\xa4", b"a\tb"])
async def test_an_id_that_cannot_be_kept_is_replaced(client, sent):
    response = await client.get("/version", headers=[(b"x-request-id", sent)])
    assert re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])


async def test_head_is_get_without_a_body(client, lines):
    document = (await client.get("/openapi.json")).json()
    for path in (
        "/health",
        "/v1/models",
        "/v1/models/base",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/nope",
        COMPLETIONS,
    ):
        got, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert (await client.head(COMPLETIONS)).headers["allow"] == "POST"
    assert not any("head" in item for item in document["paths"].values())
    assert {line["method"] for line in lines()} == {"GET", "HEAD"}


async def test_head_of_a_stream_ends_at_once(serving, training):
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(2):  # on one connection
            response = await asyncio.wait_for(client.head("/v1/training/events"), 30)
            assert (response.status_code, response.content) == (200, b"")
            assert response.headers["content-type"].startswith("text/event-stream")
            assert (await client.head("/v1/models")).status_code == 200


async def test_a_slash_at_the_end_changes_nothing(client, lines):
    for path in ("/health", "/v1/models", "/v1/models/base", "/openapi.json", "/docs"):
        bare, slash = await client.get(path), await client.get(path + "/")
        assert (slash.status_code, slash.content) == (bare.status_code, bare.content)
    response = await client.post(COMPLETIONS + "/", json={"prompt": "x"})
    assert response.status_code == 200
    assert lines()[-1]["route"] == COMPLETIONS
    assert (await client.get("/")).text == "Ollama is running"


def test_lines_are_json_from_their_first_character(capsys):
    log, before = request_log.log, (request_log.log.handlers, request_log.log.propagate)
    try:
        request_log.write_plain_lines()
        log.warning("%s", '{"id":1}')
    finally:
        log.handlers, log.propagate = before
    assert capsys.readouterr().err == '{"id":1}\n'
