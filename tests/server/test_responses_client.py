"""The openai client's Responses API, unmodified, against a real uvicorn."""

import openai
import pytest
from pydantic import BaseModel

MODEL = "tiny/byte-model"


class Point(BaseModel):
    x: int
    y: int


def connect(server, **options):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **options)


async def test_create_and_go_on(serving, engine):
    async with serving() as server, connect(server) as client:
        first = await client.responses.create(model=MODEL, input="hi", instructions="be kind", max_output_tokens=20)
        assert (first.output_text, first.status, first._request_id) == ("Hi ä!", "completed", first.id)
        await client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
        assert engine.prompt_text == "u:hi\na:Hi ä!\nu:more\na:"
        again = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
        await client.responses.create(model=MODEL, input=again, store=False)
        assert engine.requests[-1].prompts == engine.requests[-2].prompts


async def test_retrieve_and_delete(serving):
    async with serving() as server, connect(server) as client:
        first = await client.responses.create(model=MODEL, input="hi")
        assert await client.responses.retrieve(first.id) == first
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.retrieve(first.id)
        assert gone.value.code == "response_not_found"


@pytest.mark.parametrize("streamed", [False, True])
async def test_parse(serving, engine, streamed):
    engine.text = '{"x": 1, "y": 2}'
    async with serving() as server, connect(server) as client:
        if streamed:
            async with client.responses.stream(model=MODEL, input="where?", text_format=Point) as stream:
                parsed = await stream.get_final_response()
        else:
            parsed = await client.responses.parse(model=MODEL, input="where?", text_format=Point)
        assert parsed.output_parsed == Point(x=1, y=2)
        assert engine.requests[0].grammar is not None
