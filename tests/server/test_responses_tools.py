"""Functions and reasoning in `/v1/responses`: items, events, and turns of the conversation."""

import json
from dataclasses import replace

import pytest
from openai.types.responses import Response
from server.asking import answered, refusal
from server.fakes import CARD, RecordingTokenizer
from server.test_responses_stream import assert_sums_up, events_of

from mlx_parallm.core.text import Reasoning
from mlx_parallm.server.api.responses.body import ITEM_LIST, messages_of

URL = "/v1/responses"
NOW = {"type": "function", "name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALLS = (
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)


@pytest.fixture
def tokenizer():
    made = RecordingTokenizer()
    made.reasoning = Reasoning("{think}", "{/think}")
    return made


@pytest.fixture
def client(make_client, tokenizer):
    return make_client(replace(CARD, context_length=10_000), tokenizer)


async def respond(client, **body):
    answer = await answered(client, URL, {"input": "hi", **body})
    Response.model_validate(answer)
    return answer


async def test_calls_are_items(client, engine, tokenizer):
    engine.text = f"I look.\n{CALLS}"
    got = await respond(client, tools=[NOW, ADD], parallel_tool_calls=True)
    message, now, add = got["output"]
    assert message["content"][0]["text"] == "I look."
    assert [item["id"][:3] for item in (now, add)] == ["fc_", "fc_"]
    assert now["call_id"] != add["call_id"]
    assert (now["type"], now["name"], now["arguments"]) == ("function_call", "now", "{}")
    assert (add["status"], add["name"], json.loads(add["arguments"])) == ("completed", "add", {"a": 1})
    assert (got["tools"], got["tool_choice"]) == ([NOW, ADD], "auto")
    told = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in (NOW, ADD)]
    assert tokenizer.given[1]["tools"] == told


async def test_reasoning_is_an_item_and_counted(client, engine):
    engine.text = "{think}Hm.{/think}Hi"
    got = await respond(client)
    thought, message = got["output"]
    assert thought.pop("id").startswith("rs_")
    content = [{"type": "reasoning_text", "text": "Hm."}]
    assert thought == {"type": "reasoning", "status": "completed", "summary": [], "content": content}
    assert message["content"][0]["text"] == "Hi"
    assert got["usage"]["output_tokens_details"] == {"reasoning_tokens": len("{think}Hm.")}


async def test_a_call_that_is_cut_off_is_incomplete_and_left_out_of_later_prompts(client, engine, tokenizer):
    engine.text = f"I look.\n{CALLS}"
    got = await respond(client, tools=[NOW, ADD], max_output_tokens=len(engine.text) - len("1}}\n</tool_call>"))
    message, now, add = got["output"]
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (message["status"], message["content"][0]["text"]) == ("completed", "I look.")
    assert (now["status"], now["arguments"]) == ("completed", "{}")
    assert (add["status"], add["name"], add["arguments"]) == ("incomplete", "add", '{"a": ')
    for goes_on in ({"previous_response_id": got["id"]}, {"input": [*got["output"], {"role": "user", "content": "?"}]}):
        await respond(client, **{"input": "?", "tools": [NOW, ADD], **goes_on})
        (turn,) = (turn for turn in tokenizer.given[0] if turn["role"] == "assistant")
        assert [call["function"]["name"] for call in turn["tool_calls"]] == ["now"]


@pytest.mark.parametrize(
    "text", ["Hi", "{think}Hm.{/think}Hi", CALLS, f"{{think}}Hm.{{/think}}I look.{CALLS}", "$ <tool"]
)
@pytest.mark.parametrize("limit", [None, 12, 40, 60])
async def test_a_stream_equals_the_whole(client, engine, text, limit):
    engine.text = text
    asked = {"tools": [NOW, ADD], "max_output_tokens": limit}
    whole = await respond(client, **asked)
    response = await client.post(URL, json={"input": "hi", "stream": True, **asked})
    events = events_of(response.text)
    assert_sums_up(events)
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def without_ids(response):
    for thing in (response, *response["output"]):
        assert thing.pop("id")
        thing.pop("call_id", None)
    return response | {"created_at": 0}


async def test_a_conversation_continues_after_a_call(client, engine, tokenizer):
    engine.text = "{think}Hm.{/think}" + CALLS
    first = await respond(client, tools=[NOW, ADD])
    _, now, add = first["output"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "5"} for call in (now, add)]
    await respond(client, input=outputs, previous_response_id=first["id"], tools=[NOW, ADD])
    continued, _ = tokenizer.given
    asked, turn, *results = continued
    assert asked == {"role": "user", "content": "hi"}
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "", "Hm.")
    assert [call["id"] for call in turn["tool_calls"]] == [now["call_id"], add["call_id"]]
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "now", "arguments": {}},
        {"name": "add", "arguments": {"a": 1}},
    ]
    assert results == [{"role": "tool", "content": "5", "tool_call_id": call["call_id"]} for call in (now, add)]
    said_again = [{"role": "user", "content": "hi"}, *first["output"], *outputs]
    await respond(client, input=said_again, tools=[NOW, ADD])
    assert tokenizer.given[0] == continued


SOME = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}, SOME])
async def test_a_choice_is_enforced(client, engine, choice):
    got = await respond(client, tools=[NOW, ADD], tool_choice=choice)
    assert got["tool_choice"] == choice
    assert engine.requests[0].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{**NOW, "parameters": {"type": "array"}}], "tool_choice": "required"}, "tools[0].parameters"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (
            {"tools": [NOW], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}},
            "text.format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
async def test_invalid_tools(client, engine, fields, param):
    error = await refusal(client.post(URL, json={"input": "hi", **fields}), 400, param=param)
    assert ".function" not in error["message"]
    assert not engine.requests


def call(name):
    return {"type": "function_call", "call_id": f"c_{name}", "name": name, "arguments": "{}"}


def called(name):
    return {"id": f"c_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def thought(text, summary=()):
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": "rs_1", "summary": list(summary), "content": content, "encrypted_content": None}


SUMMARY = [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]
"""Of reasoning that another server hides."""


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([said("a"), said("b")], [said("a"), said("b")]),
        (
            [thought("t"), said("a"), call("x"), call("y")],
            [{**said("a"), "reasoning_content": "t", "tool_calls": [called("x"), called("y")]}],
        ),
        ([call("x"), said("a")], [{**said("a"), "tool_calls": [called("x")]}]),
        ([thought("t"), thought("u")], [{"role": "assistant", "reasoning_content": "tu"}]),
        (
            [said("a"), thought("t"), said("b")],
            [said("a"), {**said("b"), "reasoning_content": "t"}],
        ),
        (
            [call("x"), thought("t"), call("y")],
            [
                {"role": "assistant", "tool_calls": [called("x")]},
                {"role": "assistant", "reasoning_content": "t", "tool_calls": [called("y")]},
            ],
        ),
        ([thought("", SUMMARY)], [{"role": "assistant", "reasoning_content": "s\n\nt"}]),
        ([thought("u", SUMMARY)], [{"role": "assistant", "reasoning_content": "u"}]),
        ([thought("")], []),
    ],
)
def test_consecutive_items_of_the_assistant_are_one_message(items, messages):
    assert messages_of(ITEM_LIST.validate_python(items)) == messages
