"""Streams of `/v1/messages`, byte for byte, and their agreement with the whole message."""

import asyncio
import json
import re

import httpx
import pytest
from pydantic_core import from_json

from mlx_parallm.errors import OverloadedError, StepFailedError

URL = "/v1/messages"
ASKED = {"model": "base", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"at": 1}}\n</tool_call>'


@pytest.fixture
def client(thinking_client):
    return thinking_client


async def transcript(client, **body):
    """The raw stream, with ids written as ID."""
    response = await client.post(URL, json={**ASKED, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert re.search('"id":"(msg_[0-9a-f]{32})"', response.text).group(1) == response.headers["request-id"]
    return re.sub("(msg|call)_[0-9a-f]{24,32}", r"\1_ID", response.text)


def said(kind, rest=""):
    return f'event: {kind}\ndata: {{"type":"{kind}"{rest}}}\n\n'


def opened(prompt_tokens):
    usage = f'{{"input_tokens":{prompt_tokens},"output_tokens":0}}'
    return said(
        "message_start",
        ',"message":{"id":"msg_ID","type":"message","role":"assistant","model":"tiny/byte-model","content":[],'
        f'"stop_reason":null,"stop_sequence":null,"usage":{usage}}}',
    )


def block(index, empty, *deltas):
    return (
        said("content_block_start", f',"index":{index},"content_block":{empty}')
        + "".join(said("content_block_delta", f',"index":{index},"delta":{delta}') for delta in deltas)
        + said("content_block_stop", f',"index":{index}')
    )


def closed(reason, tokens, stop="null", prompt_tokens=7, cached=0):
    return said(
        "message_delta",
        f',"delta":{{"stop_reason":"{reason}","stop_sequence":{stop}}},"usage":{{"input_tokens":{prompt_tokens},'
        f'"cache_creation_input_tokens":0,"cache_read_input_tokens":{cached},"output_tokens":{tokens}}}',
    ) + said("message_stop")


TEXT = '{"type":"text","text":""}'


async def test_a_text(client, engine):
    engine.text, engine.cached_tokens = "Ä!", 5
    assert await transcript(client) == (
        opened(7)
        + block(0, TEXT, '{"type":"text_delta","text":"Ä"}', '{"type":"text_delta","text":"!"}')
        + closed("end_turn", 3, prompt_tokens=2, cached=5)
    )


async def test_thinking_text_and_a_call(client, engine):
    engine.text = "{think}H{/think}I" + CALL
    prompt = len(f"u:hi\ntools=[{repr_of_tool()}]\na:")
    assert await transcript(client, tools=[NOW]) == (
        opened(prompt)
        + block(
            0,
            '{"type":"thinking","thinking":"","signature":""}',
            '{"type":"thinking_delta","thinking":"H"}',
            '{"type":"signature_delta","signature":""}',
        )
        + block(1, TEXT, '{"type":"text_delta","text":"I"}')
        + block(
            2,
            '{"type":"tool_use","id":"call_ID","name":"now","input":{}}',
            '{"type":"input_json_delta","partial_json":"{\\"at\\": 1}"}',
        )
        + closed("tool_use", len(engine.text), prompt_tokens=prompt)
    )


def repr_of_tool():
    return str({"type": "function", "function": {"name": "now", "parameters": NOW["input_schema"]}})


async def test_nothing_is_an_empty_text(client, engine):
    engine.text, engine.silent_end = "x", True
    assert await transcript(client) == opened(7) + block(0, TEXT) + closed("end_turn", 1)


async def test_a_stop_sequence_and_the_limit(client, engine):
    engine.text, engine.stop_reason = "AB", "\n\nHuman"
    deltas = [f'{{"type":"text_delta","text":"{letter}"}}' for letter in "AB"]
    assert await transcript(client, stop_sequences=["\n\nHuman"]) == (
        opened(7) + block(0, TEXT, *deltas) + closed("stop_sequence", 2, '"\\n\\nHuman"')
    )
    engine.stop_reason = None
    assert await transcript(client, max_tokens=1) == opened(7) + block(0, TEXT, deltas[0]) + closed("max_tokens", 1)


@pytest.mark.parametrize(
    "text", ["Hi", "{think}Hm.{/think}Hi", CALL + CALL, f"{{think}}Hm.{{/think}}I look.{CALL} End"]
)
@pytest.mark.parametrize("limit", [1000, 12, 40, 60])
@pytest.mark.parametrize("strict", [False, True])
async def test_a_stream_sums_up_to_the_whole(client, engine, text, limit, strict):
    """With a strict tool, the grammar makes calls certain, so that they come in pieces."""
    engine.text = text
    asked = {"tools": [{**NOW, "strict": strict}], "max_tokens": limit}
    response = await client.post(URL, json={**ASKED, **asked})
    whole = re.sub("(msg|call)_[0-9a-f]{24,32}", r"\1_ID", response.text)
    assert json.loads(whole) == summed_up(await transcript(client, **asked))


def summed_up(text):
    """The message, put together from the events of a stream."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    message, jsons = events[0]["message"], {}
    for event in events[1:]:
        content = message["content"]
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, added in event["delta"].items():
                if name == "partial_json":
                    jsons[event["index"]] = jsons.get(event["index"], "") + added
                elif name != "type":
                    content[event["index"]][name] += added
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for index, arguments in jsons.items():
        message["content"][index]["input"] = from_json(arguments, allow_partial=True)
    return message


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (StepFailedError("at /home/x: 0x7f"), "api_error", "The step that carried this request failed; try again."),
        (RuntimeError("secret"), "api_error", "The server failed; its log says why."),
        (OverloadedError("try later"), "rate_limit_error", "try later"),
    ],
)
async def test_failure_in_mid_stream_is_the_last_event(client, engine, error, kind, message):
    engine.fail_before, engine.error = 1, error
    text = await transcript(client)
    assert text.endswith(
        f'event: error\ndata: {{"type":"error","error":{{"type":"{kind}","message":"{message}"}}}}\n\n'
    )


async def test_a_silent_stream_is_kept_open_by_pings(monkeypatch, engine, serving):
    monkeypatch.setattr("mlx_parallm.server.streams.PING_INTERVAL_S", 0.02)
    engine.pause_before = 0
    asked = {"method": "POST", "url": URL, "json": {**ASKED, "stream": True}}
    async with (
        serving() as server,
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream(**asked) as response,
        asyncio.timeout(30),
    ):
        lines = response.aiter_lines()
        while await anext(lines) != "event: ping":
            pass
        assert await anext(lines) == 'data: {"type":"ping"}'
        engine.go_on.set()
        assert [line async for line in lines][-2] == 'data: {"type":"message_stop"}'
