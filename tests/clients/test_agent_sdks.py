"""Libraries for agents, with tools and typed answers: Vercel's AI SDK, pydantic-ai and openai-agents.

Calls and objects are enforced by grammar, so their form is certain; which city the small model names is not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from clients.asked import ASKED, WEATHER
from clients.running import script
from jsonschema import validate
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

CITIES = ("Paris", "London", "Rome")


@pytest.fixture(scope="module")
def chat(server: Server) -> dict[str, Any]:
    """The text of the answer over plain HTTP, and its tokens."""
    said = {"model": SERVED, "max_tokens": ASKED["max_tokens"], "temperature": 0}
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": ASKED["question"]}], **said)
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return {"text": text, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}


def is_capital(value: dict[str, Any]) -> bool:
    return value["city"] in CITIES and value["certain"] in (True, False)


def test_the_ai_sdk(server: Server, node: None, chat: dict[str, Any]) -> None:
    """The tool runs in the client, with the arguments of the call, which came in pieces."""
    parts = ("chat", "stream", "parsed", "parsed_stream", "tool_call")
    answers = script("with_ai_sdk.js", server.url, ASKED, parts)
    assert answers["chat"] == answers["stream"] == chat
    assert is_capital(answers["parsed"])
    assert answers["parsed_stream"] == answers["parsed"]
    told = answers["tool_call"]
    (call,) = told["calls"]
    validate(call["arguments"], WEATHER)
    assert call["name"] == "get_weather"
    assert told["streamed"] == told["calls"]
    assert told["ran"] == [call["arguments"]] * 2
    assert told["pieces"] > 3
    assert told["reason"] == "tool-calls"


def test_pydantic_ai(server: Server, chat: dict[str, Any]) -> None:
    parts = ("chat", "stream", "parsed", "parsed_by_responses", "parsed_by_tool")
    answers = script("with_pydantic_ai.py", server.url, ASKED, parts)
    assert answers["chat"] == answers["stream"] == chat
    assert is_capital(answers["parsed"])
    assert answers["parsed_by_responses"] == answers["parsed"]
    by_tool = answers["parsed_by_tool"]
    assert is_capital(by_tool["whole"])
    assert by_tool["streamed"] == by_tool["whole"]


def test_openai_agents(server: Server, chat: dict[str, Any]) -> None:
    """Over chat completions and over Responses."""
    parts = ("chat", "stream", "parsed", "tool_call")
    answers = script("with_openai_agents.py", server.url, ASKED, parts)
    assert answers["chat"] == answers["stream"] == chat
    assert is_capital(answers["parsed"])
    by_responses, by_chat = (answers["tool_call"][api] for api in ("responses", "chat"))
    for told in (by_responses, by_chat):
        assert is_capital(told["output"])
        assert json.loads(told["arguments"]) == {"city": told["output"]["city"]}
    assert by_responses["pieces"] > 1
    assert by_responses["output"] == by_chat["output"]
