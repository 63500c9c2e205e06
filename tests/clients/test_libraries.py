"""Libraries that people call: each asks the same, and is told what plain HTTP is told."""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import ASKED, WEATHER
from clients.running import script
from jsonschema import validate
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

PLAIN = ("chat", "stream", "completion", "together", "parsed", "unknown_model")
CLIENTS = ("with_openai.py", "with_litellm.py", "with_langchain.py", "with_openai.js")
CAPITAL = {"city": "Paris", "certain": True}


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
    return {"chat": chat, "stream": chat, "completion": completion, "together": [text] * 4, "parsed": CAPITAL}


@pytest.mark.parametrize("client", CLIENTS)
def test_it_hears_what_plain_http_hears(
    request: pytest.FixtureRequest, server: Server, told: dict[str, Any], client: str
) -> None:
    """Chat with usage, whole and streamed; completions; several at once; a parsed object; an error of its own."""
    if client.endswith(".js"):
        request.getfixturevalue("node")
    answers = script(client, server.url, ASKED, PLAIN)
    assert "No model or adapter is called 'nobody'" in answers.pop("unknown_model")
    assert answers == told


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
    assert parsed["city"] in ("Paris", "London", "Rome")
    assert parsed["certain"] in (True, False)
