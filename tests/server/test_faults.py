"""Invalid input and the errors for it."""

import json
import math

import pytest
from server.asking import fault, refusal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def body_with(**fields):
    return {"prompt": "x", **fields}


async def refused(client, status=400, path=COMPLETIONS, **fields):
    """Posts a body whose only fault is in `fields`; the error object."""
    base = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return await refusal(client.post(path, content=json.dumps(base | fields), headers=JSON), status)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "x"',
        b"[]",
        b'"x"',
        b"null",
        b"prompt=x",
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
        b'{"prompt":"\xff\xfe"}',
    ],
    ids=lambda raw: raw[:24].decode("latin-1"),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize"])
async def test_1_2_malformed_bodies(client, path, raw):
    await refusal(client.post(path, content=raw, headers=JSON), 400, type="invalid_request_error")


@pytest.mark.parametrize("fields", [{"prompt": "a\ud800"}, {"stop": ["\udfff"]}, {"model": "\ud800"}, {"\ud800": 1}])
async def test_3_lone_surrogates(client, fields):
    assert "is not valid JSON" in (await refused(client, **fields))["message"]


async def test_3_a_surrogate_pair_is_a_character(client, engine):
    response = await client.post(COMPLETIONS, content=b'{"prompt":"\\ud83d\\ude00"}', headers=JSON)
    assert response.status_code == 200
    assert bytes(engine.requests[0].prompts[0]).decode() == "😀"


async def test_4_body_over_the_limit(make_client):
    client = make_client(max_body_bytes=1000)
    await refusal(client.post(COMPLETIONS, json={"prompt": "x" * 1000}), 413, code="body_too_large")

    async def undeclared():
        for _ in range(1000):
            yield b"x" * 100

    await refusal(client.post(COMPLETIONS, content=undeclared(), headers=JSON), 413, code="body_too_large")


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""])
async def test_5_content_types(client, kind):
    await refusal(
        client.post(COMPLETIONS, content=b'{"prompt":"x"}', headers={"content-type": kind}),
        415,
        code="unsupported_media_type",
    )


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "Application/JSON; charset=utf-8"])
async def test_5_curls_default_content_type_is_accepted(client, kind):
    response = await client.post(COMPLETIONS, content=b'{"prompt":"x"}', headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": -1}, {"n": 10**6}, {"n": 65, "prompt": ["x", "y"]}])
async def test_6_too_many_sequences(client, engine, fields):
    """They are refused before the prompt is tokenised."""
    client.app.state.services.models.first.tokenizer.encode = pytest.fail
    assert (await refused(client, **fields))["param"] == "n"
    assert not engine.requests


@pytest.mark.parametrize("max_tokens", [-2, 2**31, 0, 1.5, "3", True])
async def test_7_max_tokens(client, max_tokens):
    assert (await refused(client, max_tokens=max_tokens))["param"] == "max_tokens"


async def test_8_context_overflow_names_both_numbers(client):
    error = await refused(client, prompt=[1] * 64, max_tokens=5)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 64 tokens"), (
        "litellm looks for OpenAI's words"
    )
    assert "69" in error["message"]
    assert "64" in error["message"]
    collected = {"max_tokens": 5, "collect_trajectory": True}
    assert (await refused(client, prompt=[1] * 60, **collected))["code"] == "context_length_exceeded"
    assert (await refused(client, prompt=[1] * 64))["code"] == "context_length_exceeded"
    long_chat = [{"role": "user", "content": "x" * 70}]
    assert (await refused(client, path=CHAT, messages=long_chat))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [math.nan, math.inf, -math.inf, -1, 2.1, False, "1", [1], 10**400]),
        ("top_p", [2, -0.1, True, "x", math.nan]),
        ("top_k", [-2, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [5, -5, math.nan]),
        ("frequency_penalty", [5, -5]),
        ("repetition_penalty", [0, -1, 11]),
        ("seed", [1.5, 2**63, -(2**63) - 1, "1", True]),
        ("stream", [1, "true"]),
        ("n", ["1", 1.0, False]),
        ("min_tokens", [-1, 10**6]),
        ("ignore_eos", [1]),
        ("priority", [0.5, 2**40]),
        ("metadata", [{"a": 1}, {"a": "x" * 513}, {str(k): "" for k in range(17)}, []]),
        ("model", [1, ["x"]]),
        ("stop", [5, [1], {}]),
    ],
)
async def test_9_values_out_of_bounds_name_their_field(client, engine, path, name, values):
    for value in values:
        assert (await refused(client, path=path, **{name: value}))["param"] == name, value
    assert not engine.requests


@pytest.mark.parametrize(
    "bias",
    [
        {"258": 1},
        {"x": 1},
        {"1.0": 1},
        {"-1": 1},
        {"01": 1},
        {"1": math.nan},
        {"1": 101},
        {"1": True},
        {"1": "1"},
        [1],
        {str(k): 1 for k in range(2000)},
    ],
    ids=lambda bias: str(bias)[:20],
)
async def test_10_logit_bias(client, bias):
    assert (await refused(client, logit_bias=bias))["param"] == "logit_bias"


@pytest.mark.parametrize("stop", [["x"] * 10_000, ["a", ""], "x" * 2**20, ["a"] * 17])
async def test_11_stop(client, stop):
    assert (await refused(client, stop=stop))["param"] == "stop"


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [258],
        [[1], [258]],
        [],
        [[]],
        [[1], []],
        [1, "a"],
        ["a", [1]],
        [1, [1]],
        [True],
        [1.0],
        "",
        ["x", ""],
        None,
        5,
        {"a": 1},
        [[[1]]],
        [2**40],
        [10**30],
    ],
    ids=str,
)
async def test_13_prompts(client, engine, prompt):
    assert (await refused(client, prompt=prompt))["param"] == "prompt"
    assert not engine.requests


OPEN_ENDED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"v": "x" * 70_000}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({**OPEN_ENDED, "prompt_token_ids": [1]}, "continue_final_message"),
        ({**OPEN_ENDED, "messages": [{"role": "assistant", "content": ""}]}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"messages": ["x"] * 10_000}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_14_chat(client, engine, fields, param):
    named = (await refused(client, path=CHAT, **fields))["param"]
    assert named == param or named.startswith(f"{param}[")
    assert not engine.requests


async def test_fields_without_effect_are_accepted(client):
    harmless = {
        "user": "u",
        "store": True,
        "thinking": {"type": "enabled"},
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "temperature": None,
        "stop": None,
        "seed": None,
    }
    chat = {"tools": [], "tool_choice": "auto", "functions": None, "modalities": ["text"]}
    messages = [
        {"role": "user", "content": "x", "name": "me"},
        {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "z"},
    ]
    completion = await client.post(COMPLETIONS, json=body_with(**harmless, best_of=1, suffix=None))
    answer = await client.post(CHAT, json={"messages": messages, **harmless, **chat})
    assert (completion.status_code, answer.status_code) == (200, 200), completion.text + answer.text


async def test_routes_and_methods(client):
    await refusal(client.get("/nope"), 404, code="not_found")
    wrong = await client.get(COMPLETIONS)
    assert (wrong.status_code, fault(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
