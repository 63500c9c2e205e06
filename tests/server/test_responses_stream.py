"""Streams of `/v1/responses`, byte for byte, and their agreement with the whole response."""

import json
import re

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from mlx_parallm.errors import ContextLengthError, GrammarError, StepFailedError

URL = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)


async def transcript(client, **body):
    """The raw stream, with ids and times written as ID and 0."""
    response = await client.post(URL, json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert re.search('"id":"(resp_[0-9a-f]{32})"', response.text).group(1) == response.headers["x-request-id"]
    return re.sub("_[0-9a-f]{32}", "_ID", re.sub('"created_at":[0-9]+', '"created_at":0', response.text))


def events_of(text):
    """Each event as it is typed by the openai client, and as JSON; the last one ends the stream."""
    assert text.endswith("\n\n")
    events = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def said(kind, number, rest):
    return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{rest}}}\n\n'


ASKED = (
    '"previous_response_id":null,"instructions":null,"max_output_tokens":null,"temperature":1.0,"top_p":1.0,'
    '"text":{"format":{"type":"text"}},"tools":[],"tool_choice":"auto","parallel_tool_calls":true,'
    '"reasoning":{"effort":null,"summary":null},"metadata":{},"store":true,"background":false,"truncation":"disabled"}'
)


def response_object(status, output, usage):
    return (
        f'"response":{{"id":"resp_ID","object":"response","created_at":0,"status":"{status}","error":null,'
        f'"incomplete_details":null,"model":"tiny/byte-model","output":[{output}],"usage":{usage},{ASKED}'
    )


def message(status, content):
    return f'{{"id":"msg_ID","type":"message","status":"{status}","role":"assistant","content":[{content}]}}'


def text_part(text):
    return f'{{"type":"output_text","text":"{text}","annotations":[]}}'


async def test_a_message(client, engine):
    engine.text = "Ä!"
    where = '"output_index":0,"content_index":0,"item_id":"msg_ID"'
    begun = response_object("in_progress", "", "null")
    whole = message("completed", text_part("Ä!"))
    usage = (
        '{"input_tokens":7,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":3,'
        '"output_tokens_details":{"reasoning_tokens":0},"total_tokens":10}'
    )
    assert await transcript(client) == (
        said("response.created", 0, begun)
        + said("response.in_progress", 1, begun)
        + said("response.output_item.added", 2, '"output_index":0,"item":' + message("in_progress", ""))
        + said("response.content_part.added", 3, f'{where},"part":{text_part("")}')
        + said("response.output_text.delta", 4, f'{where},"delta":"Ä","logprobs":[]')
        + said("response.output_text.delta", 5, f'{where},"delta":"!","logprobs":[]')
        + said("response.output_text.done", 6, f'{where},"text":"Ä!","logprobs":[]')
        + said("response.content_part.done", 7, f'{where},"part":{text_part("Ä!")}')
        + said("response.output_item.done", 8, f'"output_index":0,"item":{whole}')
        + said("response.completed", 9, response_object("completed", whole, usage))
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_output_tokens": 2}, {"collect_trajectory": True}, {"instructions": "x", "store": False}],
    ids=str,
)
async def test_the_last_event_is_the_whole_answer(client, engine, fields):
    events = events_of(await transcript(client, **fields))
    whole = (await client.post(URL, json={"input": "hi", **fields})).text
    whole = json.loads(re.sub("_[0-9a-f]{32}", "_ID", whole)) | {"created_at": 0}
    assert events[-1]["response"] == whole
    assert_sums_up(events)


def assert_sums_up(events):
    """Items and their texts, put together from the events, are the response's output."""
    items, texts = {}, {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        index = event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            items[index], texts[index] = event["item"], ""
        elif kind.endswith(".delta"):
            texts[index] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[index]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[index]
        elif kind == "output_item.done":
            item = event["item"]
            assert (item["id"], item["type"]) == (items[index]["id"], items[index]["type"])
            whole = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
            assert texts[index] == whole
            items[index] = item
    assert list(items.values()) == events[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StepFailedError("at /home/x: 0x7f"), "server_error", "The step that carried this request failed; try again."),
        (RuntimeError("secret"), "server_error", "The server failed; its log says why."),
        (GrammarError("simplify it"), "invalid_prompt", "simplify it"),
    ],
)
async def test_failure_in_mid_stream_is_the_last_event(client, engine, error, code, message):
    engine.fail_before, engine.error = 1, error
    events = events_of(await transcript(client))
    failed = events[-1]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": message}
    gone = await client.get(f"{URL}/{failed['response']['id']}")
    assert gone.status_code == 404


async def test_a_conversation_too_long_has_the_code_that_codex_knows(client, engine):
    """OpenAI's own client lists no such code."""
    engine.fail_before, engine.error = 1, ContextLengthError("too long")
    assert '"error":{"code":"context_length_exceeded","message":"too long"}' in await transcript(client)
