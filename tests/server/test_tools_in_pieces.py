"""Calls that a grammar enforces are streamed as the model writes them: chat and Responses, byte for byte."""

import json
import re
from dataclasses import replace

import pytest
from server.asking import answered
from server.fakes import CARD
from server.test_tools import join

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
PIECES = ["", "{", '"', "a", '"', ":", " ", '"', "é", '"', "}"]
"""The fake engine writes a byte a step."""
ENFORCED = ["required", "named", "strict"]


@pytest.fixture
def client(make_client):
    return make_client(replace(CARD, context_length=10_000))


def chat_body(kind, **fields):
    function = {"name": "add", "parameters": PARAMETERS, "strict": kind == "strict"}
    choices = {"required": "required", "named": {"type": "function", "function": {"name": "add"}}, "strict": "auto"}
    tools = [{"type": "function", "function": function}]
    return {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choices[kind], **fields}


async def deltas_of(client, **body):
    """The raw chunks with their deltas; ids and times are written as ID and 0."""
    response = await client.post(CHAT, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    text = re.sub('"(call|chatcmpl)[_-][0-9a-f]+"', '"ID"', re.sub('"created":[0-9]+', '"created":0', response.text))
    assert text.endswith("data: [DONE]\n\n")
    return text.removesuffix("data: [DONE]\n\n")


def chunk(delta, reason="null"):
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'
    fields = '"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny/byte-model"'
    return f'data: {{{fields},"choices":[{choice}]}}\n\n'


def call_delta(fields):
    return f'{{"tool_calls":[{{"index":0,{fields}}}]}}'


@pytest.mark.parametrize("kind", ENFORCED)
async def test_chat(client, engine, kind):
    engine.text = CALL
    first = '"id":"ID","type":"function","function":{"name":"add","arguments":""}'
    more = [f'"function":{{"arguments":{json.dumps(piece, ensure_ascii=False)}}}' for piece in PIECES[1:]]
    reason = '"stop"' if kind == "named" else '"tool_calls"'
    begun = call_delta(first).replace('{"tool', '{"role":"assistant","content":null,"tool')
    expected = [chunk(begun), *(chunk(call_delta(fields)) for fields in more), chunk("{}", reason)]
    assert await deltas_of(client, **chat_body(kind)) == "".join(expected)


async def test_a_call_that_may_still_become_text_comes_whole(client, engine):
    engine.text = CALL
    body = chat_body("required", tool_choice="auto")
    arguments = json.dumps('{"a": "é"}', ensure_ascii=False)
    whole = f'"id":"ID","type":"function","function":{{"name":"add","arguments":{arguments}}}'
    begun = call_delta(whole).replace('{"tool', '{"role":"assistant","content":null,"tool')
    assert await deltas_of(client, **body) == chunk(begun, '"tool_calls"')


async def joined(client, **body):
    lines = (await deltas_of(client, **body)).splitlines()
    choice = {"message": {"content": None}, "finish_reason": None}
    for line in filter(None, lines):
        join(choice, json.loads(line.removeprefix("data: "))["choices"][0])
    return choice


async def whole(client, **body):
    return (await answered(client, CHAT, body))["choices"][0]


def functions(choice):
    return [call["function"] for call in choice["message"].get("tool_calls", [])]


@pytest.mark.parametrize("limit", range(8, len(CALL), 5))
@pytest.mark.parametrize("cut_by", ["length", "stop"])
async def test_a_call_that_is_cut_off_has_the_pieces_so_far(client, engine, limit, cut_by):
    engine.text = CALL if cut_by == "length" else CALL[:limit]
    engine.stop_reason = None if cut_by == "length" else "x"
    body = chat_body("named", **({"max_tokens": limit} if cut_by == "length" else {}))
    stream, answer = await joined(client, **body), await whole(client, **body)
    assert (stream["finish_reason"], answer["finish_reason"]) == (cut_by, cut_by)
    assert (stream["message"]["content"] or "", answer["message"]["content"] or "") == ("", "")
    assert functions(stream) == functions(answer)
    named = [{"name": "add", "arguments": CALL[:limit].partition('"arguments": ')[2][: len('{"a": "é"}')]}]
    if cut_by == "stop":
        assert functions(stream) == (named if limit >= CALL.index('{"a"') else [])
