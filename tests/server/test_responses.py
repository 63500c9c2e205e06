"""`/v1/responses`: from items to the prompt, and the whole response."""

import json

import pytest
from openai.types.responses import Response
from server.asking import answered, refusal

URL = "/v1/responses"


async def respond(client, **body):
    answer = await answered(client, URL, {"input": "hi", **body})
    Response.model_validate(answer)
    return answer


async def test_the_whole_response(client, engine):
    engine.cached_tokens = 3
    response = await client.post(URL, json={"input": "hi", "metadata": {"k": "v"}})
    got = response.json()
    Response.model_validate(got)
    assert got["id"] == response.headers["x-request-id"] == engine.requests[0].request_id
    assert got.pop("id").startswith("resp_")
    assert got.pop("created_at") > 1.7e9
    assert got["output"][0].pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Hi ä!", "annotations": []}
    assert got == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny/byte-model",
        "output": [{"type": "message", "status": "completed", "role": "assistant", "content": [text]}],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 13,
        },
        "previous_response_id": None,
        "instructions": None,
        "max_output_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "metadata": {"k": "v"},
        "store": True,
        "background": False,
        "truncation": "disabled",
    }


async def test_an_empty_answer_is_an_empty_message(client, engine):
    engine.text, engine.silent_end = "$", True
    (message,) = (await respond(client))["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": []}]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
        {"type": "json_schema", "name": "n", "description": "d", "schema": {"type": "array"}},
    ],
)
async def test_text_formats_are_enforced_and_returned(client, engine, form):
    got = await respond(client, text={"format": form, "verbosity": "low"})
    assert got["text"] == {"format": form}
    assert engine.requests[0].grammar is not None


async def test_fields_without_effect_are_accepted(client):
    await respond(
        client,
        user="u",
        prompt_cache_key="k",
        service_tier="auto",
        truncation="disabled",
        background=False,
        top_logprobs=0,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        stream_options={"include_obfuscation": False},
        tools=[],
        tool_choice="auto",
        conversation=None,
    )


REFUSED = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "computer_call", "action": json.loads("[" * 70 + "]" * 70)}]}, "input[0]"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "input[1].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": "refuse"}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": False}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2**31}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": ["x"]}, "messages"),
    ({"n": 2}, "n"),
    ({"background": True}, "background"),
    ({"truncation": "x"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 7}}}}, "text.format"),
    ({"tools": [{"type": 5}]}, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"tools": [{"type": "web_search"}], "collect_trajectory": True}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"metadata": {"k": 5}}, "metadata"),
    ({"scoring_function": "exact"}, "scoring_function"),
    ({"previous_response_id": "x" * 200}, "previous_response_id"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
async def test_errors_name_the_field_that_was_sent(client, engine, fields, param, stream):
    error = await refusal(client.post(URL, json={"input": "hi", **fields, "stream": stream}), 400, param=param)
    assert not any(name in error["message"] for name in ("messages[", "max_completion_tokens", "response_format"))
    assert not engine.requests
