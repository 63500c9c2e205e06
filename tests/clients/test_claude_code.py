"""Claude Code 2.1.330, unmodified, in its non-interactive mode against `/v1/messages`.

The bundled model makes one edit: the call is enforced by grammar, and the client's prompt and tools are cut to what
fits 8,192 tokens. A tiny random model with a context of 64k gets the client's requests as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.agents import GREETING, installed, run_agent, serving_long_context, work_folder
from main_job.serving import Server, start, stop

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
def bundled() -> Iterator[Server]:
    running = start("--model-aliases", "claude-*")
    yield running
    stop(running)


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
    """Checks each event of a message, and returns the message that they make."""
    start_, *blocks, end, stop_ = (event for event in events if event["type"] != "ping")
    message = start_["message"]
    assert (start_["type"], end["type"], stop_) == ("message_start", "message_delta", {"type": "message_stop"})
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
    for event in blocks:
        content = message["content"]
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"] | {"deltas": []})
            continue
        assert event["index"] == len(content) - 1
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] in DELTAS[content[-1]["type"]]
            content[-1]["deltas"].append(event["delta"])
        else:
            assert event == {"type": "content_block_stop", "index": len(content) - 1}
    assert [event["type"] for event in blocks].count("content_block_stop") == len(message["content"]) > 0
    usage = message["usage"]["input_tokens"]
    assert usage == end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"]
    return message | end["delta"] | {"usage": end["usage"], "prompt_tokens": usage}


def joined(block: Event, name: str) -> str:
    return "".join(delta[name] for delta in block["deltas"])


def test_the_bundled_model_edits_a_file(claude: str, bundled: Server, folder: Path) -> None:
    """Its tool is Edit, with a schema of one file and one text; the model chooses the new text. The second turn tells
    the result of the first; the same call then has nothing to replace."""
    edit = {
        "type": "object",
        "properties": {
            "file_path": {"const": str(folder / GREETING)},
            "old_string": {"const": "Hallo"},
            "new_string": {"type": "string", "pattern": "^[A-Za-z]{1,12}$"},
        },
        "required": ["file_path", "old_string", "new_string"],
        "additionalProperties": False,
    }
    enforced = {
        "temperature": 0,
        "tools": [{"name": "Edit", "description": "Replaces a text in a file.", "input_schema": edit}],
        "tool_choice": {"type": "tool", "name": "Edit"},
    }
    cut = ("--tools", "Edit", "--system-prompt", "You edit files.", "--setting-sources", "", "--strict-mcp-config")
    told = told_by(
        claude,
        bundled,
        folder,
        *cut,
        *("--max-turns", "2", "--permission-mode", "acceptEdits"),
        "In @greeting.txt, replace Hallo by Hello.",
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_EXTRA_BODY=json.dumps(enforced),
    )
    first, second = map(check, messages_in(told))
    (call,) = first["content"]
    arguments = json.loads(joined(call, "partial_json"))
    assert (call["name"], first["stop_reason"], len(call["deltas"]) > 1) == ("Edit", "tool_use", True)
    assert (folder / GREETING).read_text() == f"{arguments['new_string']}, world!\n"
    assert arguments["new_string"] == "Hello"
    assert first["prompt_tokens"] < second["prompt_tokens"] < 8192
    results = [line["message"]["content"][0] for line in told if line["type"] == "user"]
    assert ["is_error" in result for result in results] == [False, True]
    assert told[-1]["terminal_reason"] == "max_turns"


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
