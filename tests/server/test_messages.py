"""`/v1/messages`: what a body becomes for the chat template and the engine, whole answers, counts and errors."""

import json
from dataclasses import replace

import pytest
from server.asking import answered
from server.fakes import CARD, RecordingTokenizer
from walks import follows

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
DOCUMENT = {"type": "document", "source": {"type": "url", "url": "http://x"}}


@pytest.fixture
def tokenizer():
    return RecordingTokenizer()


@pytest.fixture
def connect(make_client, tokenizer):
    def make(context_length=10_000, **settings):
        return make_client(replace(CARD, context_length=context_length), tokenizer, **settings)

    return make


@pytest.fixture
def client(connect):
    return connect()


async def answer(client, **body):
    return await answered(client, URL, {"max_tokens": 100, "messages": USER, **body}, params={"beta": "true"})


def wrong(response):
    """The error of a response in Anthropic's form."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["request-id"] == response.headers["x-request-id"]
    body = response.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return body["error"]


async def test_a_whole_message(client, engine):
    engine.cached_tokens = 3
    got = await answer(client, system="be kind")
    assert got.pop("id").startswith("msg_")
    assert got == {
        "type": "message",
        "role": "assistant",
        "model": "tiny/byte-model",
        "content": [{"type": "text", "text": "Hi ä!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("s:be kind\nu:hi\na:") - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 6,
        },
    }


def text(words, **more):
    return {"type": "text", "text": words, **more}


async def test_the_conversation_of_an_agent(client, engine, tokenizer):
    messages = [
        {"role": "user", "content": [text("a"), text("b", cache_control={"type": "ephemeral"})]},
        {"role": "system", "content": [text("later")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look."),
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [text("no"), text("clock")], "is_error": True},
                text("And?"),
            ],
        },
        {"role": "user", "content": "More."},
    ]
    system = [text("x-anthropic-billing-header: cc_version=1"), text("You help."), text("Be brief.")]
    await answer(client, messages=messages, system=system, tools=[ADD, NOW])
    said, variables = tokenizer.given
    assert said == (
        {"role": "system", "content": "You help.\nBe brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "later"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "no\nclock", "tool_call_id": "c2"},
        {"role": "user", "content": "And?\nMore."},
    )
    function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    assert variables["tools"][0] == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True, "thinking": True}),
    ],
)
async def test_thinking_is_a_switch_of_the_template(client, tokenizer, thinking, variables):
    await answer(client, thinking=thinking)
    assert tokenizer.given[1] == variables


async def test_calls_are_blocks(client, engine):
    engine.text = f"I look.\n{CALL}"
    got = await answer(client, tools=[ADD])
    words, call = got["content"]
    assert (words, got["stop_reason"]) == (text("I look."), "tool_use")
    assert call.pop("id")
    assert call == {"type": "tool_use", "name": "add", "input": {"a": 1}}


@pytest.mark.parametrize(("limit", "arguments"), [(CALL.index("}}"), {"a": 1}), (CALL.index(" 1}}"), {})])
async def test_a_call_that_is_cut_off_has_what_was_complete(client, engine, limit, arguments):
    engine.text = CALL
    got = await answer(client, tools=[ADD], max_tokens=limit)
    assert (got["stop_reason"], got["content"][0]["input"]) == ("max_tokens", arguments)


@pytest.mark.parametrize(
    ("choice", "accepted", "refused"),
    [
        ({"type": "any"}, [CALL, CALL + "\n" + CALL], ["Words."]),
        ({"type": "any", "disable_parallel_tool_use": True}, [CALL], ["Words.", CALL + "\n" + CALL]),
        ({"type": "tool", "name": "add"}, [CALL], ["Words.", CALL.replace("add", "now").replace('"a": 1', "")]),
    ],
    ids=str,
)
async def test_a_choice_is_enforced(client, engine, choice, accepted, refused):
    await answer(client, tools=[ADD, NOW], tool_choice=choice)
    grammar = engine.requests[0].grammar
    assert [follows(grammar, words) for words in (*accepted, *refused)] == [True] * len(accepted) + [False] * len(
        refused
    )


async def test_a_strict_tool_and_a_format_are_enforced(client, engine):
    await answer(client, tools=[{**ADD, "strict": True}])
    assert follows(engine.requests[-1].grammar, CALL)
    assert not follows(engine.requests[-1].grammar, CALL.replace("1", '"x"'))
    schema = {"type": "array", "items": {"type": "integer"}}
    await answer(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "xhigh"})
    assert follows(engine.requests[-1].grammar, "[1, 2]")
    assert not follows(engine.requests[-1].grammar, "Words.")


async def test_what_an_agent_sends_beside_is_accepted_unread(client):
    body = {
        "messages": [
            {
                "role": "user",
                "content": [text("x", citations=[], cache_control={"type": "ephemeral"})],
                "output_config": {"effort": "medium"},
            }
        ],
        "max_tokens": 5,
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u" * 2000},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "betas": ["effort-2025-11-24"],
        "tools": [
            {**ADD, "defer_loading": True, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}
        ],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    response = await client.post(URL, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


async def test_server_tools_are_dropped_and_named(client, tokenizer):
    body = {"messages": USER, "max_tokens": 5, "tools": [SEARCH, NOW, {**SEARCH, "type": "bash_20250124"}]}
    response = await client.post(URL, json={**body, "mcp_servers": [{"url": "http://x"}]})
    assert response.status_code == 200, response.text
    assert [tool["function"]["name"] for tool in tokenizer.given[1]["tools"]] == ["now"]
    assert response.headers["x-ignored-fields"] == "mcp_servers, tools.web_search_20250305, tools.bash_20250124"


async def test_counting(client, engine):
    for body in ({"messages": USER}, {"messages": USER, "max_tokens": 0, "system": [text("x")], "tools": [NOW]}):
        counted = await client.post(COUNT, params={"beta": "true"}, json=body)
        got = await answer(client, **{**body, "max_tokens": 5})
        assert counted.json() == {"input_tokens": got["usage"]["input_tokens"]}
    assert len(engine.requests) == 2
    long = await client.post(COUNT, json={"messages": [{"role": "user", "content": "x" * 20_000}]})
    assert wrong(long)["type"] == "invalid_request_error"


@pytest.mark.parametrize("url", [URL, COUNT])
@pytest.mark.parametrize("more", [{}, {"tool_choice": {"type": "any"}}])
async def test_a_conversation_that_the_server_should_have_kept_is_refused(client, engine, url, more):
    """Anthropic's SDK sends it whole after this answer."""
    body = {"messages": USER, "max_tokens": 5, **more}
    for thread in ({"type": "continue", "previous_message_id": "msg_1"}, {"type": "fork"}, {"id": "x"}):
        response = await client.post(url, json={**body, "thread": thread})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["details"] == {"error_code": "thread_not_found"}
        assert error["message"] == "This server keeps no threads; send the whole conversation in messages."
    assert not engine.requests
    begun = await client.post(url, json={"messages": USER, "max_tokens": 5, "thread": {"type": "create"}})
    assert begun.status_code == 200


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


RESULT = {"type": "tool_result", "tool_use_id": "c"}
DEEP = {"type": "tool_use", "id": "c", "name": "x", "input": json.loads('{"a":' * 65 + "1" + "}" * 65)}
BAD_BODIES = [
    ({"max_tokens": None}, "max_tokens: Field required"),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"messages": []}, "messages: "),
    (user(text("x"), IMAGE), "messages[0].content[1]: this model reads only text; leave the image out"),
    (user(DOCUMENT), "messages[0].content[0]: this model reads only text; leave the document out"),
    (user({**RESULT, "content": [text("x"), IMAGE]}), "messages[0].content[0].content[1]: this model reads only text"),
    (user({"type": "search_result"}), "messages[0].content[0].type: not a supported type of content blocks"),
    (user({"type": "tool_use", "id": "c", "name": "x", "input": {}}), "messages[0].content[0]: only messages of"),
    ({"messages": [*USER, {"role": "assistant", "content": [DEEP]}, *USER]}, "messages[1].content[0].input: is nested"),
    ({"system": [IMAGE]}, "system[0]: this model reads only text"),
    (
        {"messages": [*USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages: the last",
    ),
    ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name: "),
    (
        {"tools": [{**ADD, "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema: ",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: is not the name of a function"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}}, "output_config.format"),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"temperature": 3}, "temperature: "),
]


@pytest.mark.parametrize(("fields", "message"), BAD_BODIES, ids=[message for _, message in BAD_BODIES])
async def test_a_bad_body_is_refused_by_the_name_of_the_field(client, engine, fields, message):
    response = await client.post(URL, json={"messages": USER, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    assert wrong(response)["type"] == "invalid_request_error"
    assert wrong(response)["message"].startswith(message)
    assert not engine.requests


async def test_errors_of_middlewares_and_of_routing_have_the_form_too(connect):
    client = connect(api_key="secret", max_body_bytes=1000)
    good = {"x-api-key": "secret"}
    body = {"messages": USER, "max_tokens": 5}
    sent = [
        (client.post(URL, json=body), 401, "authentication_error"),
        (client.post(COUNT, json=body), 401, "authentication_error"),
        (client.post(URL, json=body, headers={"origin": "http://evil"}), 403, "permission_error"),
        (client.post(URL, json={**body, "model": "unknown"}, headers=good), 404, "not_found_error"),
        (client.post(f"{URL}/batches", json=body, headers=good), 404, "not_found_error"),
        (client.get(URL, headers=good), 405, "invalid_request_error"),
        (client.post(URL, json={**body, "system": "x" * 1000}, headers=good), 413, "request_too_large"),
        (client.post(URL, content="x", headers={**good, "content-type": "text/plain"}), 415, "invalid_request_error"),
    ]
    for request, status, kind in sent:
        response = await request
        assert (response.status_code, wrong(response)["type"]) == (status, kind), response.text
    for key in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert (await client.post(f"{URL}/", json=body, headers=key)).status_code == 200
    assert "error" in (await client.get("/v1/models")).json()
    assert "type" not in (await client.get("/v1/models")).json()


async def test_aliases_mean_the_served_model(connect, engine, adapters):
    adapters.publish("math")
    client = connect(model_aliases=("claude-*", "gpt-5"))
    for model in ("claude-opus-5-5", "claude-haiku-4-5-20251001", "gpt-5"):
        assert (await answer(client, model=model))["model"] == "tiny/byte-model"
        assert (await client.post(COUNT, json={"messages": USER, "model": model})).status_code == 200
    assert (await answer(client, model="claude-x", lora_adapter="math"))["model"] == "math"
    assert (await answer(client, model="math"))["lora_adapter"] == "math@1"
    for model in ("gpt-5-mini", "my-claude-x", "claude-" + "x" * 300):
        assert (await client.post(URL, json={"messages": USER, "max_tokens": 5, "model": model})).status_code == 404
