"""Anthropic's SDKs, of Python from 2.12 and of JavaScript 1.14, unmodified, against `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.asked import ASKED, WEATHER
from clients.running import script
from jsonschema import validate
from main_job.serving import SERVED, Server, start, stop
from tiny import CHAT_TEMPLATE, save_tiny, tiny_tokenizer

pytestmark = pytest.mark.timeout(900)

THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}{% endif %}"
)


def told_by(server: Server, *parts: str) -> dict[str, Any]:
    return script("with_anthropic.py", server.url, ASKED, parts)


def test_text_whole_and_streamed_is_what_chat_says(server: Server) -> None:
    question = {"role": "user", "content": ASKED["question"]}
    said = {"model": SERVED, "max_tokens": ASKED["max_tokens"], "temperature": 0, "messages": [question]}
    chat = server.post("/v1/chat/completions", **said)
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    expected = {"text": text, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}
    told = told_by(server, "chat", "stream", "raw_events", "count")
    assert "Paris" in text
    assert told["chat"] == told["stream"] == expected
    start_, begun, *deltas, stopped, end, stop_ = told["raw_events"]
    assert (start_, begun, stopped) == ("message_start", "content_block_start", "content_block_stop")
    assert (set(deltas), end, stop_) == ({"content_block_delta"}, "message_delta", "message_stop")
    assert told["count"][0] == usage["prompt_tokens"]
    assert told["count"][1] != told["count"][0]


def test_tools_are_called_and_their_results_are_told(server: Server) -> None:
    told = told_by(server, "tool_call")["tool_call"]
    (call,) = told["calls"]
    assert call["name"] == "get_weather"
    validate(call["arguments"], WEATHER)
    assert told["streamed"] == told["calls"]
    assert told["reasons"] == ["tool_use", "tool_use"]
    assert told["pieces"] > 1
    assert told["after"]


def test_a_format_is_followed(server: Server) -> None:
    assert told_by(server, "parsed")["parsed"]["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("client", ["with_anthropic.py", "with_anthropic.js"])
def test_a_thread_has_its_history(request: pytest.FixtureRequest, server: Server, client: str) -> None:
    """Its last answer is the one to the whole conversation, which the SDK sends again when it is told to."""
    if client.endswith(".js"):
        request.getfixturevalue("node")
    told = script(client, server.url, ASKED, ("thread",))["thread"]
    assert told["said"] == ["user", "assistant", "user", "assistant", "user"]
    assert told["last"] == told["whole"]


def test_a_runner_of_tools_has_its_history(server: Server, node: None) -> None:
    told = script("with_anthropic.js", server.url, ASKED, ("tool_runner",))["tool_runner"]
    assert told["said"] == ["user", "assistant", "user", "assistant", "user"]
    assert told["ran"] == told["calls"]
    assert len(told["calls"]) == 2
    for call in told["calls"]:
        validate(call, WEATHER)


@pytest.fixture
def thinking_server(tmp_path: Path) -> Iterator[Server]:
    """A tiny random model that marks its reasoning."""
    save_tiny("llama", tmp_path / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tiny")
    running = start("--model-path", str(tmp_path / "tiny"), "--served-model-name", SERVED, "--kv-cache-memory", "64MB")
    yield running
    stop(running)


def test_thinking_is_a_block_of_its_own(thinking_server: Server) -> None:
    assert told_by(thinking_server, "thinking")["thinking"] == {
        "blocks": ["thinking", "text"],
        "last_told": "signature",
        "disabled": ["text"],
        "sent_back": "message",
    }
