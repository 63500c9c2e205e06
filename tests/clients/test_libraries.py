"""Libraries that people call: each asks the same, and is told what plain HTTP is told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from clients.asked import ASKED, WEATHER
from clients.running import script
from jsonschema import validate
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

PLAIN = ("chat", "stream", "completion", "parsed")
CLIENTS = ("with_litellm.py", "with_langchain.py", "with_openai.js")
CITIES = ("Paris", "London", "Rome")
CAPITAL = {"city": "Paris", "certain": True}
TEXTS = [f"A text with the number {number}." for number in range(300)]


@pytest.fixture(scope="module")
def told(server: Server) -> dict[str, Any]:
    """The answers over plain HTTP, by part."""
    common = {"model": SERVED, "max_tokens": ASKED["max_tokens"], "temperature": 0}
    question = {"role": "user", "content": ASKED["question"]}
    answer = server.post("/v1/chat/completions", messages=[question], **common)
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    chat = {"text": text, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}
    completion = server.post("/v1/completions", prompt=ASKED["prompt"], **common)["choices"][0]["text"]
    assert "Paris" in text
    assert "Paris" in completion
    return {"chat": chat, "stream": chat, "completion": completion, "parsed": CAPITAL}


@pytest.mark.parametrize("client", CLIENTS)
def test_it_hears_what_plain_http_hears(
    request: pytest.FixtureRequest, server: Server, told: dict[str, Any], client: str
) -> None:
    """Chat with usage, whole and streamed; completions; a parsed object."""
    if client.endswith(".js"):
        request.getfixturevalue("node")
    assert script(client, server.url, ASKED, PLAIN) == told


@pytest.mark.parametrize("client", CLIENTS)
def test_tools_are_called(request: pytest.FixtureRequest, server: Server, client: str) -> None:
    """`tool_choice` required; the streamed call, put together by the client, is the same."""
    if client.endswith(".js"):
        request.getfixturevalue("node")
    answer = script(client, server.url, ASKED, ("tool_call",))["tool_call"]
    assert answer["calls"]
    for call in answer["calls"]:
        assert call["name"] == "get_weather"
        validate(call["arguments"], WEATHER)
    assert answer["streamed"] == answer["calls"]
    assert answer.get("after", "an answer")


def test_instructor_parses(server: Server) -> None:
    assert script("with_instructor.py", server.url, ASKED, ("parsed",)) == {"parsed": CAPITAL}


def test_instructor_parses_by_a_tool(server: Server) -> None:
    (parsed,) = script("with_instructor.py", server.url, ASKED, ("parsed_by_tool",)).values()
    assert parsed["city"] in CITIES
    assert parsed["certain"] in (True, False)


def test_litellm_speaks_ollamas_api(server: Server, told: dict[str, Any]) -> None:
    """Whole, asynchronously and streamed, by both of its providers."""
    answers = script("with_litellm.py", server.url, ASKED, ("ollama", "ollama_vectors"))
    assert answers["ollama"]["ollama_chat"] == [told["chat"]["text"]] * 3
    assert answers["ollama"]["ollama"] == [answers["ollama"]["ollama"][0]] * 3
    assert "Paris" in answers["ollama"]["ollama"][0]
    first, second = answers["ollama_vectors"]
    assert len(first) == len(second) > 64
    assert first != second


def test_litellm_knows_that_a_prompt_is_too_long(server: Server) -> None:
    """By its own class of error, at which a router of it tries a model with a longer context."""
    assert (
        "maximum context length is 8192 tokens"
        in script("with_litellm.py", server.url, ASKED, ("too_long",))["too_long"]
    )


@pytest.mark.parametrize("client", ["with_langchain.py", "with_langchain.js"])
def test_langchain_gets_a_vector_of_each_of_many_texts(
    request: pytest.FixtureRequest, server: Server, client: str
) -> None:
    if client.endswith(".js"):
        request.getfixturevalue("node")
    vectors = script(client, server.url, ASKED | {"texts": TEXTS}, ("vectors",))["vectors"]
    assert len(vectors) == len(TEXTS)
    answer = server.post("/v1/embeddings", model=SERVED, input=[TEXTS[0], TEXTS[-1]])
    for vector, plain in zip((vectors[0], vectors[-1]), answer["data"], strict=True):
        assert math.dist(vector, plain["embedding"]) < 1e-3


def test_guidance_captures(server: Server) -> None:
    answers = script("with_guidance.py", server.url, ASKED, ("captures", "parsed"))
    told = answers["captures"]
    assert told["text"] == f"The capital is {told['city']}, since {told['year']}."
    assert re.fullmatch("1[0-9]{3}", told["year"])
    assert answers["parsed"]["city"] in CITIES
    assert answers["parsed"]["certain"] in (True, False)


def test_outlines_speaks_as_to_vllm_and_as_to_sglang(server: Server) -> None:
    answers = script("with_outlines.py", server.url, ASKED, ("parsed", "pattern", "grammar", "choice"))
    assert answers["parsed"] == [CAPITAL] * 2
    assert all(re.fullmatch("[a-c]{3}", text) for text in answers["pattern"])
    assert set(answers["grammar"]) <= {"Paris", "Rome"}
    assert set(answers["choice"]) <= set(CITIES)


def test_aiohttp_uses_idle_connections_again(server: Server) -> None:
    """After 6 seconds, when many servers have closed them."""
    assert script("with_aiohttp.py", server.url, ASKED, ("idle",))["idle"] == {"created": 20, "reused": 20}
