"""The openai client, unmodified, against a real uvicorn."""

import json
from dataclasses import replace
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from server.fakes import CARD

USER = [{"role": "user", "content": "hi"}]
MODEL = "tiny/byte-model"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]
    certain: bool


def connect(server, **options):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", **{"api_key": "unused", "max_retries": 0, **options})


async def test_chat_completions_models(serving):
    async with serving() as server, connect(server) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2, n=2)
        assert [choice.message.content for choice in chat.choices] == ["Hi ä!"] * 2
        assert bytes(token.bytes[0] for token in chat.choices[0].logprobs.content).decode() == "Hi ä!"
        assert chat.usage.total_tokens == 7 + 12
        assert chat._request_id == chat.id
        completion = await client.completions.create(model=MODEL, prompt="x", max_tokens=2, logprobs=1)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("Hi", "length")
        assert [model.id async for model in client.models.list()] == [MODEL, "base-model", "base"]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_an_adapter_is_a_model(serving, engine, adapters):
    math = adapters.publish("math")
    async with serving() as server, connect(server) as client:
        chat = await client.chat.completions.create(model="math", messages=USER)
        assert (chat.model, chat.lora_adapter, chat.choices[0].message.content) == ("math", "math@1", "Hi ä!")
        stream = await client.completions.create(model="math@1", prompt="x", stream=True)
        assert {(chunk.model, chunk.lora_adapter) async for chunk in stream} == {("math", "math@1")}
        raw = await client.completions.with_raw_response.create(
            model=MODEL, prompt="x", extra_body={"lora_adapter": "math"}
        )
        assert raw.headers["x-lora-adapter"] == "math@1"
        assert {request.adapter for request in engine.requests} == {math}
        assert [model.id async for model in client.models.list()] == [MODEL, "base-model", "base", "math"]
        assert (await client.models.retrieve("math")).parent == MODEL


async def test_an_object_is_parsed(serving, engine):
    """A pydantic class goes out as a strict schema, which the engine is given as a grammar."""
    engine.text = '{"city": "Rome", "certain": true}'
    async with serving() as server, connect(server) as client:
        parsed = await client.chat.completions.parse(model=MODEL, messages=USER, response_format=Capital)
        assert parsed.choices[0].message.parsed == Capital(city="Rome", certain=True)
        async with client.chat.completions.stream(model=MODEL, messages=USER, response_format=Capital) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Capital(city="Rome", certain=True)
    assert all(request.grammar is not None for request in engine.requests)


async def test_a_tool_is_called(serving, engine):
    """Whole and streamed alike; the result can be told."""
    engine.text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    async with serving(card=replace(CARD, context_length=1000)) as server, connect(server) as client:
        ask = {"model": MODEL, "messages": USER, "tools": tools}
        message = (await client.chat.completions.create(**ask)).choices[0].message
        async with client.chat.completions.stream(**ask) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        for said in (message, streamed):
            (call,) = said.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        engine.text = "Rain."
        told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        answer = await client.chat.completions.create(**ask | {"messages": [*USER, message, told]})
        assert answer.choices[0].message.content == "Rain."


async def test_errors_become_the_clients_exceptions(serving):
    async with serving(api_key="right") as server:
        async with connect(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as wrong_key:
                await client.chat.completions.create(model=MODEL, messages=USER)
            assert wrong_key.value.code == "invalid_api_key"
        async with connect(server, api_key="right") as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=USER)
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=USER, temperature=3)
            assert bad.value.param == "temperature"


async def test_a_full_queue_is_retried(serving, engine):
    async with serving(max_batch_size=1, max_queued=1) as server, connect(server, max_retries=3) as client:
        gate = server.app.state.services.gate
        place = gate.reserve(2)
        place.__enter__()
        slept = []

        async def release(*_, **__):
            slept.append(place.__exit__(None, None, None))

        client._sleep_for_retry = release
        await client.completions.create(model=MODEL, prompt="x")
        assert len(slept) == 1


async def test_an_error_in_mid_stream_reaches_the_client(serving, engine):
    engine.fail_before, engine.error = 2, RuntimeError("boom")
    async with serving() as server, connect(server) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]
