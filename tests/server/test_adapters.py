"""Which adapter a request gets, how its answer says so, and that it is let go of (cases 3, 16, 17, 24)."""

import asyncio
import json
from dataclasses import replace

import pytest
from server.asking import fault, refusal
from server.fakes import CARD

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import AdapterFileError, InvalidRequestError, StepFailedError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
BASE = "tiny/byte-model"
both_endpoints = pytest.mark.parametrize("path", BODIES)
both_ways = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def math(adapters):
    """math@2 is live, math@1 is still known."""
    adapters.publish("math")
    return adapters.publish("math")


def said(response):
    """What an answer says of itself: (model, lora_adapter) of the body, or of every chunk."""
    if response.headers["content-type"].startswith("application/json"):
        parts = [response.json()]
    else:
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        parts = [json.loads(line) for line in lines[:-1]]
    return [(part["model"], part.get("lora_adapter")) for part in parts]


@both_endpoints
@both_ways
@pytest.mark.parametrize("field", ["model", "lora_adapter", "adapters"])
@pytest.mark.parametrize(("selector", "ref"), [("math", AdapterRef("math", 2)), ("math@1", AdapterRef("math", 1))])
async def test_each_field_names_an_adapter(client, engine, adapters, math, path, stream, field, selector, ref):
    options = {"stream": stream, "stream_options": {"include_usage": True}, "n": 2}
    response = await client.post(path, json={**BODIES[path], field: selector, **options})
    assert response.status_code == 200, response.text
    assert engine.requests[0].adapter == ref
    assert set(said(response)) == {("math", str(ref))}
    assert response.headers["x-lora-adapter"] == str(ref)
    assert adapters.leased == 0


@both_endpoints
@both_ways
@pytest.mark.parametrize("fields", [{}, {"model": BASE}])
async def test_mlx_lms_field_may_give_an_adapters_folder(client, engine, adapters, path, stream, fields):
    body = {**BODIES[path], **fields, "adapters": "runs/tone", "stream": stream}
    response = await client.post(path, json=body)
    assert set(said(response)) == {("in-folder", "in-folder@1")}
    assert adapters.folders == ["runs/tone"]
    assert (adapters.leased, client.app.state.services.gate.held) == (0, 0)


@both_endpoints
@both_ways
@pytest.mark.parametrize("fields", [{}, {"model": BASE}])
async def test_a_request_without_an_adapter_gets_that_of_the_served_folder(
    client, engine, adapters, path, stream, fields
):
    adapters.default = adapters.publish("in-folder").name
    response = await client.post(path, json={**BODIES[path], **fields, "stream": stream})
    assert set(said(response)) == {("in-folder", "in-folder@1")}
    await client.post(path, json={**BODIES[path], "model": "base"})
    assert engine.requests[-1].adapter == BASE_ADAPTER
    assert (adapters.leased, client.app.state.services.gate.held) == (0, 0)


@both_endpoints
@pytest.mark.parametrize("kind", [InvalidRequestError, AdapterFileError])
async def test_a_folder_that_is_refused_is_the_fault_of_adapters(client, engine, adapters, path, kind):
    adapters.error = kind("no directory inside the allowed roots", "lora_path")
    error = await refusal(client.post(path, json={**BODIES[path], "adapters": "/etc"}), 400, param="adapters")
    assert error["message"] == "no directory inside the allowed roots"
    assert not engine.requests
    assert client.app.state.services.gate.held == 0


@both_endpoints
@both_ways
@pytest.mark.parametrize("fields", [{}, {"model": BASE}, {"model": "base"}, {"lora_adapter": "base"}, {"model": None}])
async def test_the_base_says_nothing_of_adapters(client, engine, math, path, stream, fields):
    response = await client.post(path, json={**BODIES[path], **fields, "stream": stream})
    assert engine.requests[0].adapter == BASE_ADAPTER
    assert set(said(response)) == {(BASE, None)}
    assert "lora_adapter" not in response.text
    assert "x-lora-adapter" not in response.headers


@pytest.mark.parametrize("fields", [{}, {"model": BASE}])
async def test_unnamed_requests_follow_the_route_and_base_does_not(client, adapters, math, fields):
    adapters.shares = {"math@1": 1.0}
    assert said(await client.post(COMPLETIONS, json={"prompt": "x", **fields})) == [("math", "math@1")]
    assert said(await client.post(COMPLETIONS, json={"prompt": "x", "model": "base"})) == [(BASE, None)]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "math", "lora_adapter": "math", "adapters": "math"},
        {"model": BASE, "lora_adapter": "math"},
        {"model": BASE, "adapters": "math"},
    ],
    ids=str,
)
async def test_fields_that_agree(client, math, fields):
    assert said(await client.post(COMPLETIONS, json={"prompt": "x", **fields})) == [("math", "math@2")]


@both_endpoints
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "math", "lora_adapter": "math@1"},
        {"model": "base", "lora_adapter": "math"},
        {"lora_adapter": "math", "adapters": "other"},
        {"model": "math", "adapters": "base"},
    ],
    ids=str,
)
async def test_fields_that_disagree_are_both_named(client, engine, adapters, math, path, fields):
    response = await client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400
    assert all(field in fault(response)["message"] for field in fields)
    assert fault(response)["param"] in fields
    assert not engine.requests


@pytest.mark.parametrize("name", ["tiny/byte-model", "second", "third", "base-model"])
async def test_every_name_of_the_served_model_may_come_with_an_adapter(make_client, engine, math, name):
    card = replace(CARD, aliases=("second", "third"))
    async with make_client(card) as client:
        answer = (await client.post(COMPLETIONS, json={"model": name, "lora_adapter": "math@1", "prompt": "x"})).json()
        assert (answer["model"], answer["lora_adapter"]) == ("math", "math@1")
        assert engine.requests[-1].adapter == AdapterRef("math", 1)
        ids = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert ids == ["tiny/byte-model", "second", "third", "base-model", "base", "math"]
        assert (await client.get(f"/v1/models/{name}")).status_code == 200


STRANGE = ["@", "math@", "math@99", "@1", "%2e%2e", "..", "nul\0", "ä", "", " math", "x" * 160]
PATHS = ["../x", "/etc/passwd", "a/b", "%2e%2e/x"]


@both_endpoints
@both_ways
@pytest.mark.parametrize("field", ["model", "lora_adapter", "adapters"])
async def test_16_17_unknown_names_reach_the_adapters_as_text_and_never_mean_the_base(
    client, engine, adapters, math, path, stream, field
):
    names = STRANGE if field == "adapters" else [*STRANGE, *PATHS]
    for name in names if field != "model" else filter(None, names):  # an empty model is the server's own
        response = await client.post(path, json={**BODIES[path], field: name, "stream": stream})
        error = fault(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", field), name
        assert adapters.asked[-1] == name
    assert not engine.requests
    assert (adapters.leased, client.app.state.services.gate.held) == (0, 0)


@pytest.mark.parametrize("field", ["model", "lora_adapter", "adapters"])
async def test_16_endless_names_are_unknown_without_asking(client, adapters, field):
    response = await client.post(COMPLETIONS, json={"prompt": "x", field: "x" * 100_000})
    assert (response.status_code, fault(response)["param"]) == (404, field)
    assert len(response.content) < 500
    assert not adapters.asked


async def test_24_a_version_published_in_mid_stream_changes_only_later_requests(client, engine, adapters, math):
    engine.pause_before = 3
    old = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x", "model": "math", "stream": True}))
    await engine.paused.wait()
    adapters.publish("math")
    engine.pause_before = None
    new = await client.post(COMPLETIONS, json={"prompt": "x", "model": "math"})
    engine.go_on.set()
    assert set(said(await old)) == {("math", "math@2")}
    assert len(said(await old)) > 3
    assert said(new) == [("math", "math@3")]


# ---- leases: one a request, from admission to its end, whichever that is ----------------------------


@both_ways
@pytest.mark.parametrize("error", [StepFailedError("x"), RuntimeError("x")])
async def test_a_failed_request_lets_its_version_go(client, engine, adapters, math, stream, error):
    engine.fail_before, engine.error = 2, error
    await client.post(COMPLETIONS, json={"prompt": "x", "model": "math", "stream": stream})
    assert len(engine.requests) == 1
    assert adapters.leased == 0


@both_ways
@pytest.mark.parametrize("fields", [{"prompt": [258]}, {"prompt": [1] * 64}, {"n": 129}])
async def test_a_refused_request_holds_no_version(client, adapters, math, stream, fields):
    response = await client.post(COMPLETIONS, json={"prompt": "x", "model": "math", "stream": stream, **fields})
    assert response.status_code == 400
    assert adapters.leased == 0


# ---- model names elsewhere ---------------------------------------------------------------------------


async def test_models_are_the_base_and_every_live_adapter(client, adapters, math):
    adapters.publish("code")
    *base, code, listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in base] == [BASE, "base-model", "base"]
    assert code["id"] == "code"
    assert all((model["parent"], model["max_model_len"], "version" in model) == (None, 64, False) for model in base)
    assert listed == {
        "id": "math",
        "object": "model",
        "created": 1_800_000_000,
        "owned_by": "mlx_parallm",
        "root": "math",
        "parent": BASE,
        "max_model_len": 64,
        "version": 2,
    }
    assert (await client.get("/v1/models/math")).json() == listed
    assert (await client.get("/v1/models/math@2")).json() == listed
    older = (await client.get("/v1/models/math@1")).json()
    assert (older["id"], older["version"]) == ("math@1", 1)


VERSIONED = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}]},
    "/api/generate": {"prompt": "x"},
    "/generate": {"input_ids": [1]},
}
"""A body for each route that generates."""


@both_ways
@pytest.mark.parametrize("path", VERSIONED)
async def test_every_answer_names_the_version_that_served_it(client, adapters, math, path, stream):
    way = {} if path == "/generate" else {"stream": stream}  # which has no streams
    response = await client.post(path, json={**VERSIONED[path], "model": "math", **way})
    assert response.status_code == 200, response.text
    assert response.headers["x-lora-adapter"] == "math@2"
    assert '"lora_adapter":"math@2"' in response.text.replace(": ", ":")


@pytest.mark.parametrize("body", [{"prompt": {"prompt_token_ids": [1]}}, {"input_ids": [1]}, {"prompts": ["x"]}])
async def test_every_form_of_generate_names_its_version(client, math, body):
    named = await client.post("/generate", json={**body, "model": "math@1"})
    assert '"lora_adapter":"math@1"' in named.text
    assert "lora_adapter" not in (await client.post("/generate", json=body)).text
