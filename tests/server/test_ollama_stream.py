"""Streams of Ollama's API, byte for byte, and their agreement with the whole answer."""

import json
import re
from itertools import chain

import pytest

from mlx_parallm.errors import OverloadedError, StepFailedError

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hi"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"at": 1}}\n</tool_call>'
WRITTEN_CALL = '{"id":"call_ID","function":{"name":"now","arguments":{"at":1}}}'
HEAD = '{"model":"tiny/byte-model","created_at":"NOW",'
DURATIONS = '"total_duration":400000000,"load_duration":100000000'


@pytest.fixture
def client(thinking_client):
    return thinking_client


def fixed(text):
    """The text with times written as NOW and ids as ID."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", "NOW", text)
    return re.sub("call_[0-9a-f]{24}", "call_ID", text)


async def transcript(client, path=CHAT, **body):
    asked = {"model": "base", **({"messages": USER} if path == CHAT else {"prompt": "hi"}), **body}
    response = await client.post(path, json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return fixed(response.text)


def message(content, more="", end='"done":false'):
    return f'{HEAD}"message":{{"role":"assistant","content":"{content}"{more}}},{end}}}\n'


def response(text, more="", end='"done":false'):
    return f'{HEAD}"response":"{text}"{more},{end}}}\n'


def done(tokens, reason="stop", prompt=7):
    return (
        f'"done":true,"done_reason":"{reason}",{DURATIONS},"prompt_eval_count":{prompt},'
        f'"prompt_eval_duration":100000000,"eval_count":{tokens},"eval_duration":200000000'
    )


async def test_a_chat_streams_by_default(client, engine):
    engine.text = "Ä!"
    assert await transcript(client) == message("Ä") + message("!") + message("", end=done(3))


async def test_thinking_text_and_a_call(client, engine):
    engine.text = "{think}H{/think}I" + CALL
    prompt = len(f"u:hi\ntools=[{NOW}]\na:")
    assert await transcript(client, tools=[NOW]) == (
        message("", ',"thinking":"H"')
        + message("I")
        + message("", f',"tool_calls":[{WRITTEN_CALL}]')
        + message("", end=done(len(engine.text), prompt=prompt))
    )


async def test_a_prompt(client, engine):
    engine.text = "{think}H{/think}I"
    assert await transcript(client, GENERATE) == (
        response("", ',"thinking":"H"') + response("I") + response("", end=done(len(engine.text)))
    )
    assert fixed(await whole_text(client, GENERATE)) == response("I", ',"thinking":"H"', done(17)).rstrip("\n")


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize(
    "text", ["Hi", "{think}Hm.{/think}Hi", CALL + CALL, f"{{think}}Hm.{{/think}}I look.{CALL} End"]
)
@pytest.mark.parametrize("limit", [1000, 12, 53, 60])
async def test_a_stream_sums_up_to_the_whole(client, engine, path, text, limit):
    engine.text = text
    asked = {"options": {"num_predict": limit}, **({"tools": [NOW]} if path == CHAT else {})}
    whole = json.loads(fixed(await whole_text(client, path, **asked)))
    assert whole == summed_up(await transcript(client, path, **asked))


async def whole_text(client, path, **body):
    asked = {"model": "base", "stream": False, **({"messages": USER} if path == CHAT else {"prompt": "hi"}), **body}
    response = await client.post(path, json=asked)
    assert response.headers["content-type"] == "application/json"
    return response.text


def summed_up(text):
    """The answer, put together from the lines of a stream."""
    *lines, last = map(json.loads, text.splitlines())
    said = last.get("message", last)
    for name in ("content", "response", "thinking", "tool_calls"):
        parts = [part[name] for line in lines if name in (part := line.get("message", line))]
        if parts:
            said[name] = list(chain(*parts)) if name == "tool_calls" else "".join(parts)
    return last


async def test_a_call_that_was_cut_off_has_what_is_complete(client, engine):
    engine.text = CALL.replace("1", '"noon", "in": "Rome"')
    body = {"tools": [NOW], "format": "json", "options": {"num_predict": engine.text.rindex('me"')}}
    *_, call, last = map(json.loads, (await transcript(client, **body)).splitlines())
    assert call["message"]["tool_calls"][0]["function"]["arguments"] == {"at": "noon"}
    assert last["done_reason"] == "length"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StepFailedError("at /home/x: 0x7f"), "The step that carried this request failed; try again."),
        (RuntimeError("secret"), "The server failed; its log says why."),
        (OverloadedError("try later"), "try later"),
    ],
)
async def test_failure_in_mid_stream_is_the_last_line(client, engine, error, text):
    engine.text, engine.fail_before, engine.error = "AB", 1, error
    assert await transcript(client) == message("A") + f'{{"error":"{text}"}}\n'
