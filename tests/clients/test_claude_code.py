"""Claude Code 2.1.330, unmodified, in its non-interactive mode against `/v1/messages`.

A tiny random model with a context of 64k gets the client's requests as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.agents import installed, run_agent, serving_long_context, work_folder
from main_job.serving import Server

pytestmark = pytest.mark.timeout(1800)

QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
"""The client's own variables that turn off what it would ask other hosts for."""
STREAMED = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}
LEAST_PROMPT_BYTES = 50_000

Event = dict[str, Any]


@pytest.fixture(scope="module")
def claude() -> str:
    return installed("claude_code", "claude")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return work_folder(tmp_path)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model-aliases", "claude-*", "--api-key", "secret")
    with serving_long_context(tmp_path_factory.mktemp("model"), *flags) as running:
        yield running


def told_by(claude: str, server: Server, folder: Path, *flags: str, **variables: str) -> list[Event]:
    """What the client printed: a JSON object a line."""
    command = (claude, "--print", *STREAMED, *flags)
    done = run_agent(*command, folder=folder, ANTHROPIC_BASE_URL=server.url, **QUIET, **variables)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def messages_in(told: list[Event]) -> list[list[Event]]:
    """The events of each message that the client read, in order."""
    messages: list[list[Event]] = []
    for event in (line["event"] for line in told if line["type"] == "stream_event"):
        if event["type"] == "message_start":
            messages.append([])
        messages[-1].append(event)
    return messages


def check(events: list[Event]) -> Event:
    """The message that the events of a stream make."""
    start_, *blocks, end, _ = (event for event in events if event["type"] != "ping")
    message = start_["message"]
    for event in blocks:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"] | {"deltas": []})
        elif event["type"] == "content_block_delta":
            block = message["content"][event["index"]]
            assert event["delta"]["type"] in DELTAS[block["type"]]
            block["deltas"].append(event["delta"])
    return message | end["delta"] | {"usage": end["usage"], "prompt_tokens": message["usage"]["input_tokens"]}


def joined(block: Event, name: str) -> str:
    return "".join(delta[name] for delta in block["deltas"])


def test_full_size_text(claude: str, long_context: Server, folder: Path) -> None:
    """The client's own prompt, tools and limits, and a project's notes. What a random model says is not looked at."""
    (folder / "CLAUDE.md").write_text("Write British English.\n" * 100)
    told = told_by(claude, long_context, folder, "Say hello.", ANTHROPIC_API_KEY="secret")
    (message,) = map(check, messages_in(told))
    text = "".join(joined(block, "text") for block in message["content"])
    assert message["prompt_tokens"] > LEAST_PROMPT_BYTES
    assert message["usage"]["output_tokens"] < 65536 - message["prompt_tokens"]
    assert (told[-1]["subtype"], told[-1]["is_error"], told[-1]["result"]) == ("success", False, text)


def test_full_size_call(claude: str, long_context: Server, folder: Path) -> None:
    """A call of Read is enforced, for which the client's own schema becomes a grammar. No such file exists."""
    enforced = json.dumps({"tool_choice": {"type": "tool", "name": "Read"}, "seed": 1})
    flags = ("--max-turns", "1")
    told = told_by(
        claude, long_context, folder, *flags, "Say hello.", ANTHROPIC_API_KEY="secret", CLAUDE_CODE_EXTRA_BODY=enforced
    )
    message = check(messages_in(told)[0])
    call = message["content"][-1]
    assert (call["type"], call["name"]) == ("tool_use", "Read")
    assert message["stop_reason"] in ("tool_use", "max_tokens")
    if message["stop_reason"] == "tool_use":
        assert set(json.loads(joined(call, "partial_json"))) >= {"file_path"}
