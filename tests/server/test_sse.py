"""Streams of completions and chat, byte for byte."""

import json
import re

import httpx
import pytest

from mlx_parallm.errors import StepFailedError
from mlx_parallm.server import streams

DONE = "data: [DONE]\n\n"


async def transcript(client, path, **body):
    """The raw stream, with this run's id and time written as ID and 0."""
    response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    assert re.fullmatch("(chatcmpl|cmpl)-[0-9a-f]{32}", first["id"])
    assert response.headers["x-request-id"] == first["id"]
    return response.text.replace(first["id"], "ID").replace(f'"created":{first["created"]}', '"created":0')


def text_chunk(rest, tail=""):
    head = 'data: {"id":"ID","object":"text_completion","created":0,"model":"tiny/byte-model"'
    return f'{head},"choices":[{rest}]{tail}}}\n\n'


def chat_chunk(rest, tail=""):
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny/byte-model"'
    return f'{head},"choices":[{rest}]{tail}}}\n\n'


def text(index, content, reason="null", more=""):
    return f'{{"index":{index},"text":"{content}","logprobs":null,"finish_reason":{reason}{more}}}'


def delta(index, content, reason="null"):
    return f'{{"index":{index},"delta":{content},"logprobs":null,"finish_reason":{reason}}}'


async def test_a_step_without_text_sends_nothing(client, engine):
    engine.text = "ä!"
    got = await transcript(client, "/v1/completions", prompt="x")
    assert got == text_chunk(text(0, "ä")) + text_chunk(text(0, "!", '"stop"')) + DONE


async def test_chat_whose_end_adds_no_text(client, engine):
    engine.text, engine.silent_end = "a$", True
    got = await transcript(client, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert got == (
        chat_chunk(delta(0, '{"role":"assistant","content":"a"}')) + chat_chunk(delta(0, "{}", '"stop"')) + DONE
    )


async def test_usage_is_null_until_the_chunk_without_choices(client, engine):
    engine.cached_tokens = 1
    got = await transcript(
        client, "/v1/completions", prompt="abc", max_tokens=2, stream_options={"include_usage": True}
    )
    null = ',"usage":null'
    final = (
        ',"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        '"prompt_tokens_details":{"cached_tokens":1}}'
    )
    assert got == (
        text_chunk(text(0, "H"), null) + text_chunk(text(0, "i", '"length"'), null) + text_chunk("", final) + DONE
    )


async def test_continuous_usage_counts_every_token(client, engine):
    engine.text = "ä"
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await transcript(client, "/v1/completions", prompt="abc", stream_options=options)
    running = ',"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'
    assert got.startswith(text_chunk(text(0, "ä", '"stop"'), running))


async def test_n_and_several_prompts_interleave_by_index(client):
    got = await transcript(client, "/v1/completions", prompt=["x", "y"], n=2, max_tokens=1)
    assert got == "".join(text_chunk(text(index, "H", '"length"')) for index in range(4)) + DONE


async def test_matched_stop_string_is_named(client, engine):
    engine.text, engine.stop_reason = "A", "\n"
    got = await transcript(client, "/v1/completions", prompt="x", stop="\n")
    assert got == text_chunk(text(0, "A", '"stop"', ',"stop_reason":"\\n"')) + DONE


async def test_echo_with_logprobs_streams_the_scores_of_the_prompt(client):
    got = await transcript(client, "/v1/completions", prompt="ab", echo=True, logprobs=1, max_tokens=1)
    prompt = (
        '{"index":0,"text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[null,-0.5],'
        '"top_logprobs":[null,{"b":-0.5}],"text_offset":[0,1],"token_ids":[97,98]},"finish_reason":null}'
    )
    drawn = (
        '{"index":0,"text":"H","logprobs":{"tokens":["H"],"token_logprobs":[-0.5],'
        '"top_logprobs":[{"H":-0.5}],"text_offset":[2],"token_ids":[72]},"finish_reason":"length"}'
    )
    assert got == text_chunk(prompt) + text_chunk(drawn) + DONE


async def test_metadata_and_token_ids_are_returned(client):
    got = await transcript(
        client, "/v1/completions", prompt=[120], max_tokens=2, return_token_ids=True, metadata={"run": "7"}
    )
    tail = ',"metadata":{"run":"7"}'
    assert got == (
        text_chunk(text(0, "H", more=',"token_ids":[72],"prompt_token_ids":[120]'), tail)
        + text_chunk(text(0, "i", '"length"', ',"token_ids":[105]'), tail)
        + DONE
    )


@pytest.mark.parametrize("error", [StepFailedError("at /home/x: 0x7f"), RuntimeError("secret")])
async def test_failure_in_mid_stream_is_an_event_then_done(client, engine, error):
    engine.fail_before, engine.error = 1, error
    got = await transcript(client, "/v1/completions", prompt="x")
    code = "step_failed" if isinstance(error, StepFailedError) else "internal_error"
    message = {
        "step_failed": "The step that carried this request failed; try again.",
        "internal_error": "The server failed; its log says why.",
    }[code]
    failure = f'data: {{"error":{{"message":"{message}","type":"server_error","param":null,"code":"{code}"}}}}\n\n'
    assert got == text_chunk(text(0, "H")) + failure + DONE


async def test_a_silent_stream_has_pings(serving, engine, monkeypatch):
    engine.pause_before = 0
    monkeypatch.setattr(streams, "PING_INTERVAL_S", 0.05)
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    async with (
        serving() as server,
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = aiter(stream.aiter_lines())
        assert [await anext(lines) for _ in range(4)] == [": ping", ""] * 2
        engine.go_on.set()
        rest = [line async for line in lines]
    assert rest[-2:] == DONE.split("\n")[:2]


async def test_echo_comes_first(client):
    got = await transcript(client, "/v1/completions", prompt='a"b', echo=True, max_tokens=1)
    assert got == text_chunk(text(0, 'a\\"b')) + text_chunk(text(0, "H", '"length"')) + DONE


async def test_a_sample_that_is_faster_than_the_prompts_scores_waits_for_them(client, engine):
    forward = engine._events

    def scores_late(request):
        scored, first, *rest = forward(request)
        return [first, scored, *rest]

    engine._events = scores_late
    got = await transcript(client, "/v1/completions", prompt="a", n=2, echo=True, logprobs=0, max_tokens=1)
    chunks = [json.loads(line.removeprefix("data: ")) for line in got.split("\n\n")[:-2]]
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks] == [
        (0, "a"), (0, "H"), (1, "a"), (1, "H")
    ]  # fmt: skip
