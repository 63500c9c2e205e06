"""Calls that a grammar enforces are streamed as the model writes them: chat and Responses, byte for byte."""

import asyncio
import json
import re
from dataclasses import replace

import httpx
import pytest
from server.fakes import CARD
from server.test_responses_stream import assert_sums_up, events_of, said
from server.test_tools import join

from mlx_parallm.errors import StepFailedError

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS}
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


async def test_responses(client, engine):
    engine.text = CALL
    body = {"input": "hi", "stream": True, "tools": [ADD], "tool_choice": "required"}
    text = (await client.post(RESPONSES, json=body)).text
    assert_sums_up(events_of(text))
    text = re.sub('"fc_[0-9a-f]+"', '"ID"', re.sub('"call_[0-9a-f]+"', '"ID"', text))
    where = '"output_index":0,"item_id":"ID"'
    arguments = json.dumps('{"a": "é"}', ensure_ascii=False)
    item = '"item":{"id":"ID","type":"function_call","status":"%s","call_id":"ID","name":"add","arguments":%s}'
    expected = said("response.output_item.added", 2, '"output_index":0,' + item % ("in_progress", '""'))
    for number, piece in enumerate(PIECES[1:], 3):
        delta = json.dumps(piece, ensure_ascii=False)
        expected += said("response.function_call_arguments.delta", number, f'{where},"delta":{delta}')
    done = f'{where},"name":"add","arguments":{arguments}'
    expected += said("response.function_call_arguments.done", 13, done)
    expected += said("response.output_item.done", 14, '"output_index":0,' + item % ("completed", arguments))
    start = text.index("event: response.output_item.added")
    assert text[start : text.index("event: response.completed")] == expected


async def joined(client, **body):
    lines = (await deltas_of(client, **body)).splitlines()
    choice = {"message": {"content": None}, "finish_reason": None}
    for line in filter(None, lines):
        join(choice, json.loads(line.removeprefix("data: "))["choices"][0])
    return choice


async def whole(client, **body):
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


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


async def test_a_failure_in_the_middle_of_a_call_ends_the_stream(client, engine):
    engine.text, engine.fail_before, engine.error = CALL, CALL.index("é"), StepFailedError("x")
    response = await client.post(CHAT, json=chat_body("required", stream=True))
    *chunks, error, done = response.text.removesuffix("\n\n").split("\n\n")
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("step_failed", "data: [DONE]")
    assert json.loads(chunks[0].removeprefix("data: "))["choices"][0]["delta"]["tool_calls"]
    body = {"input": "hi", "stream": True, "tools": [ADD], "tool_choice": "required"}
    events = events_of((await client.post(RESPONSES, json=body)).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["output"] == []


async def test_a_client_that_leaves_in_the_middle_of_a_call_aborts_it(serving, engine):
    engine.text, engine.pause_before = CALL, CALL.index("é")
    async with serving(replace(CARD, context_length=10_000)) as server, httpx.AsyncClient() as client:
        body = chat_body("required", stream=True)
        async with client.stream("POST", f"{server.url}{CHAT}", json=body) as response:
            assert '"name":"add"' in await anext(response.aiter_lines())
        while not engine.aborted:
            await asyncio.sleep(0.01)
        assert not engine.live
