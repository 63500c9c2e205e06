"""Random fields: every answer is a success or an error body, and never a 5xx."""

import asyncio
import json

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.server.wire.chat import ChatBody, ChatCompletion
from mlx_parallm.server.wire.completions import Completion, CompletionBody

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 3),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def bodies(model, base):
    names = [*model.model_fields, *model.IGNORED, *model.UNSUPPORTED, "x"]
    return st.dictionaries(st.sampled_from(names), values, max_size=4).map(lambda fields: {**base, **fields})


def check(make_client, engine, path, answer, body):
    async def post():
        async with make_client() as client:
            return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    response = asyncio.run(post())
    if response.status_code == 200:
        if body.get("stream") is not True:
            answer.model_validate_json(response.text)
        assert not engine.live
    else:
        assert response.status_code in (400, 404), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        response.text.encode()


fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(body=bodies(CompletionBody, {"prompt": "x"}))
def test_completions(make_client, engine, body):
    check(make_client, engine, "/v1/completions", Completion, body)


@fuzzed
@given(body=bodies(ChatBody, {"messages": [{"role": "user", "content": "x"}]}))
def test_chat(make_client, engine, body):
    check(make_client, engine, "/v1/chat/completions", ChatCompletion, body)


@fuzzed
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | values.map(lambda v: json.dumps(v).encode()))
def test_raw_bodies(make_client, raw):
    async def post() -> httpx.Response:
        async with make_client() as client:
            return await client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    assert asyncio.run(post()).status_code == 400
