"""Unknown and unsupported fields: ignored and reported, treated as left out, or refused."""

import json
import re
from urllib.parse import unquote

import pytest
from server.asking import fault, refusal

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "x"}]
BASE = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": USER}, RESPONSES: {"input": "x"}, "/tokenize": {"prompt": "x"}}
ANTHROPIC = {MESSAGES: {"messages": USER, "max_tokens": 5}}
TOOL = {"type": "function", "function": {"name": "f"}}
IGNORED = "mlx_parallm_ignored_fields_total"


async def ignored(client, path, **fields):
    """The names that the header has, in order."""
    response = await client.post(path, json=(BASE | ANTHROPIC)[path] | fields)
    assert response.status_code == 200, response.text
    header = response.headers.get("x-ignored-fields", "")
    return [unquote(name) for name in header.split(", ")] if header else []


@pytest.mark.parametrize("path", BASE | ANTHROPIC)
async def test_an_unknown_field_is_ignored_named_and_counted(client, metric, path):
    assert await ignored(client, path, num_ctx=4096, options={"a": 1}, keep_alive="5m") == [
        "num_ctx",
        "options",
        "keep_alive",
    ]
    assert await metric(client, IGNORED) == 3


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"messages": [{**USER[0], "id": "a"}, {**USER[0], "id": "b"}]}, ["messages.id"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"a": 1}}]}]},
            ["messages.content.cache_control"],
        ),
        (CHAT, {"tools": [{**TOOL, "cache_control": {"a": 1}}]}, ["tools.cache_control"]),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, ["tools.function.x"]),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
            ["tool_choice.function.x"],
        ),
        (CHAT, {"stream_options": {"include_usages": True}}, ["stream_options.include_usages"]),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, ["response_format.x"]),
        (RESPONSES, {"input": [{**USER[0], "x": 1}]}, ["input.x"]),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]},
            ["input.content.y"],
        ),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "x": 1}]}, ["tools.x"]),
        (RESPONSES, {"reasoning": {"x": 1}}, ["reasoning.x"]),
        (RESPONSES, {"audience": {"a": 1}}, ["audience"]),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            ["messages.content.y"],
        ),
        (
            MESSAGES,
            {"system": [{"type": "text", "text": "x", "y": 1}], "mcp_servers": [1]},
            ["mcp_servers", "system.y"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
async def test_a_nested_field_is_named_by_its_path(client, path, fields, names):
    assert await ignored(client, path, **fields) == names


async def test_the_header_is_bounded_whatever_the_body(client, metric):
    hostile = {f"{k} \r\n,ä🙂" * 50: 1 for k in range(1000)}
    response = await client.post(COMPLETIONS, json=BASE[COMPLETIONS] | hostile)
    names = response.headers["x-ignored-fields"].split(", ")
    assert len(names) == 20
    assert all(re.fullmatch(r"([A-Za-z0-9_.~-]|%[0-9A-F]{2}){1,64}", name) for name in names)
    assert all(
        unquote(name, errors="strict") in next(iter(hostile)).replace("0", str(k)) for k, name in enumerate(names)
    )
    assert await metric(client, IGNORED) == 1000


async def test_a_field_without_a_name_does_not_break_the_header(client):
    for body in ({"": 1, "a": 1}, {"a": 1, "": 1}, {"": 1}):
        response = await client.post(COMPLETIONS, json=BASE[COMPLETIONS] | body)
        names = response.headers["x-ignored-fields"].split(", ")
        assert [unquote(name) for name in names] == [name or '""' for name in body]
    surrogate = b'{"prompt":"x","\\ud800":1}'
    response = await client.post(COMPLETIONS, content=surrogate, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400)


ASK_FOR_NOTHING = [
    (COMPLETIONS, {"best_of": 1, "n": 2}),
    (COMPLETIONS, {"best_of": 2, "n": 2}),
    (COMPLETIONS, {"suffix": "", "length_penalty": 1, "early_stopping": False, "use_beam_search": False}),
    (CHAT, {"vllm_xargs": {}, "thinking_blocks": None, "zzz": None, "documents": [], "stop_token_ids": []}),
    *((path, {"model": "", "stop": ""}) for path in (COMPLETIONS, CHAT)),
    (RESPONSES, {"model": ""}),
    (MESSAGES, {"model": ""}),
    ("/tokenize", {"model": ""}),
    (CHAT, {"echo": False, "include_reasoning": True, "response_format": {}}),
    (CHAT, {"messages": [{**USER[0], "cache_control": None, "images": [], "refusal": ""}]}),
    (RESPONSES, {"top_k": -1, "presence_penalty": 0, "logprobs": False, "stop": [], "n": 1, "max_output_tokens": -1}),
]


@pytest.mark.parametrize(("path", "fields"), ASK_FOR_NOTHING, ids=str)
async def test_null_empty_and_neutral_values_are_as_if_left_out(client, path, fields):
    assert await ignored(client, path, **fields) == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
        (COMPLETIONS, {"length_penalty": 2.0}, "length_penalty"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"grammar": 'root ::= "a"'}, "grammar"),
        (CHAT, {"use_beam_search": 0}, "use_beam_search"),
        (CHAT, {"messages": [{**USER[0], "images": ["x"]}]}, "messages[0].images"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens"),
        (RESPONSES, {"top_k": 5}, "top_k"),
        (RESPONSES, {"stop_token_ids": [2]}, "stop_token_ids"),
        (RESPONSES, {"skip_special_tokens": False}, "skip_special_tokens"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
    ],
    ids=str,
)
async def test_an_unsupported_value_is_refused_by_name(client, engine, path, fields, param):
    error = await refusal(client.post(path, json=BASE[path] | fields), 400, param=param)
    assert "not supported" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("path", BASE)
async def test_a_strict_server_refuses_unknown_fields(make_client, path):
    client = make_client(strict_fields=True)
    for value in (1, None):
        await refusal(client.post(path, json=BASE[path] | {"num_ctx": value}), 400, param="num_ctx")
    assert (await client.post(path, json=BASE[path])).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_collected_request_is_strict(client, engine, path):
    body = BASE[path] | {"collect_trajectory": True, "scoring_functon": "exact"}
    response = await client.post(path, json=body)
    assert (response.status_code, fault(response)["param"]) == (400, "scoring_functon")
    assert "did you mean 'scoring_function'" in fault(response)["message"]
    nested = [{**USER[0], "id": "a"}]
    response = await client.post(CHAT, json={"messages": nested, "collect_trajectory": True})
    assert fault(response)["param"] == "messages[0].id"
    assert not engine.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_a_request_that_only_headers_mark_for_collection_may_have_unknown_fields(client, engine, path):
    """Its client is an agent that cannot send another body."""
    tools = {RESPONSES: [{"type": "web_search"}], MESSAGES: [{"type": "web_search_20250305", "name": "web_search"}]}
    body = (BASE | ANTHROPIC)[path] | {"num_ctx": 1, **({"tools": tools[path]} if path in tools else {})}
    response = await client.post(path, json=body, headers={"X-Episode-Id": "7"})
    assert response.status_code == 200, response.text
    assert "num_ctx" in response.headers["x-ignored-fields"]
    assert engine.requests[0].collection.episode_id == "7"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ("/v1/adapters/rollback", {}),
        ("/v1/training/start", {}),
        ("/v1/training/checkpoint", {}),
        ("/v1/training/feedback", {"trajectory_id": "traj-0", "score": 1}),
        ("/v1/training/preference", {"prompt": "x", "correction": "y"}),
    ],
)
async def test_adapter_and_training_routes_are_strict(client, path, body):
    await refusal(client.post(path, json=body | {"num_ctx": 1}), 400, param="num_ctx")
