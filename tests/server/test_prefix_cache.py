"""The prefix cache as a client sees it: the salt of a request, and the tokens that were not computed."""

import json

import pytest
from server.asking import refusal

USER = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "x"},
}
LONGEST = 512
"""Characters of a salt."""

each_route = pytest.mark.parametrize("path", BODIES)


@each_route
async def test_the_salt_reaches_the_engine(client, engine, path):
    for fields in ({"cache_salt": "salt"}, {"cache_salt": "ä" * LONGEST}, {"cache_salt": None}, {}):
        response = await client.post(path, json=BODIES[path] | fields)
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        assert engine.requests[-1].cache_salt == (fields.get("cache_salt") or "")


@each_route
@pytest.mark.parametrize("salt", ["", "x" * (LONGEST + 1), 5, ["salt"]])
async def test_a_salt_that_is_no_short_text_is_refused(client, engine, path, salt):
    body = json.dumps(BODIES[path] | {"cache_salt": salt})
    await refusal(
        client.post(path, content=body, headers={"content-type": "application/json"}), 400, param="cache_salt"
    )
    assert not engine.requests


@each_route
async def test_a_whole_answer_tells_the_cached_tokens(client, engine, path):
    engine.cached_tokens = 5
    usage = (await client.post(path, json=BODIES[path])).json()["usage"]
    assert cached_of(usage) == 5


@each_route
async def test_a_streamed_answer_tells_the_cached_tokens(client, engine, path):
    engine.cached_tokens = 5
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = (await client.post(path, json=BODIES[path] | options)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert cached_of(events[-1].get("response", events[-1])["usage"]) == 5


def cached_of(usage):
    kind = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    return usage[kind]["cached_tokens"]
