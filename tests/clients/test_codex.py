"""Codex CLI 0.169, unmodified, in its non-interactive mode against `/v1/responses`.

A tiny random model with a context of 64k gets the client's requests at full size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.agents import installed, run_agent, serving_long_context, work_folder
from clients.relay import Body, Exchange, Relay, relaying
from main_job.serving import Server
from server.test_responses_stream import assert_sums_up, events_of

pytestmark = pytest.mark.timeout(1800)

PROVIDER = """
model = "base"
model_provider = "parallm"
check_for_update_on_startup = false
analytics.enabled = false
features.plugins = false

[model_providers.parallm]
name = "MLX ParaLLM"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
LEAST_BODY_BYTES = 35_000

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def codex() -> str:
    return installed("codex", "codex")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return work_folder(tmp_path)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_long_context(tmp_path_factory.mktemp("model")) as running:
        yield running


def told_by(codex: str, relay: Relay, folder: Path, settings: str, *command: str, fails: bool = False) -> Told:
    """What `codex exec` printed: a JSON object a line. `fails`: its turn does."""
    home = folder.parent / "codex"
    home.mkdir()
    (home / "config.toml").write_text(settings + PROVIDER.format(url=relay.url))
    flags = ("exec", "--json", "--strict-config", "--skip-git-repo-check", "--sandbox", "danger-full-access")
    done = run_agent(codex, *flags, *command, folder=folder, CODEX_HOME=str(home))
    assert done.returncode == int(fails), f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def answered(exchange: Exchange) -> dict[str, Any]:
    """Checks each event of an answer, and returns the response that they make."""
    assert exchange.status == 200, exchange.answer
    events = events_of(exchange.answer)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert_sums_up(events)
    assert events[-1]["type"] == "response.completed"
    response: dict[str, Any] = events[-1]["response"]
    return response


def items(told: Told, kind: str) -> Told:
    """The finished items of one type."""
    return [line["item"] for line in told if line["type"] == "item.completed" and line["item"]["type"] == kind]


def first_turn_calls(call: Body) -> Any:
    """Changes the client's requests: the first one must be answered by this call, and the others by text."""

    def change(body: Body) -> Body:
        outputs = [item for item in body["input"] if item["type"] == "function_call_output"]
        return {**body, "seed": 1, **({"tool_choice": "none"} if outputs else call)}

    return change


def test_a_prompt_beyond_the_context_is_not_sent_again(codex: str, server: Server, folder: Path) -> None:
    """The client reads the error's code, and says what to do."""
    (folder / "AGENTS.md").write_text("Write British English.\n" * 1000)
    with relaying(server.url) as relay:
        told = told_by(codex, relay, folder, "", "Say hello.", fails=True)
    (exchange,) = relay.exchanges
    assert (exchange.status, json.loads(exchange.answer)["error"]["code"]) == (400, "context_length_exceeded")
    assert told[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in told[-1]["error"]["message"]


def test_full_size_text(codex: str, long_context: Server, folder: Path) -> None:
    """The client's own prompt and tools. What a random model says is not looked at."""
    (folder / "AGENTS.md").write_text("Write British English.\n" * 100)
    with relaying(long_context.url) as relay:
        told = told_by(codex, relay, folder, "", "Say hello.")
    (exchange,) = relay.exchanges
    response = answered(exchange)
    assert LEAST_BODY_BYTES < exchange.size < response["usage"]["input_tokens"] * 2
    assert exchange.ignored == "tools.web_search"
    assert "namespace" in [tool["type"] for tool in exchange.body["tools"]]
    assert told[-1]["type"] == "turn.completed"
    text = "".join(part["text"] for item in response["output"] for part in item["content"])
    assert items(told, "agent_message")[-1]["text"].strip() == text.strip()


def test_full_size_call_in_a_namespace(codex: str, long_context: Server, folder: Path) -> None:
    """The client finds the tool by the namespace and the name of the call. Its schema becomes a grammar as it is."""
    named = {"type": "function", "namespace": "multi_agent_v1", "name": "close_agent"}
    with relaying(long_context.url, first_turn_calls({"tool_choice": named})) as relay:
        told = told_by(codex, relay, folder, "", "Say hello.")
    first, second = map(answered, relay.exchanges)
    (call,) = first["output"]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    assert second["output"][-1]["type"] == "message"
    *_, sent, result = relay.exchanges[1].body["input"]
    assert (sent["namespace"], sent["name"], sent["arguments"]) == (call["namespace"], call["name"], call["arguments"])
    assert "unsupported call" not in result["output"]
    assert told[-1]["type"] == "turn.completed"
