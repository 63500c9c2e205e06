"""Claude Code 2.1.330 and Codex CLI 0.169, unmodified, edit a file fifty times through a model that recites a script in
one of four families' own forms. Every request finds all that was computed before in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clients.agents import GREETING, installed, work_folder
from clients.relay import relaying
from clients.scripted.families import CONTEXT, FAMILIES, line, save_scripted
from clients.test_claude_code import check, messages_in
from clients.test_claude_code import told_by as told_by_claude
from clients.test_codex import answered, items
from clients.test_codex import told_by as told_by_codex
from main_job.serving import Server, start, stop

pytestmark = pytest.mark.timeout(1800)

TURNS = 50
BLOCK = 64
"""Tokens of a block of the cache. Fewer of an answer may be computed again."""


@contextmanager
def reciting(family: str, folder: Path, tool: str, **arguments: Any) -> Iterator[Server]:
    """A server of a model that calls the tool in every turn, with `{old}` and `{new}` lines in the arguments."""

    def filled(number: int) -> Mapping[str, Any]:
        lines = {"old": line(number), "new": line(number + 1)}
        return {key: value.format(**lines) if isinstance(value, str) else value for key, value in arguments.items()}

    save_scripted(folder, FAMILIES[family], [(tool, filled(number)) for number in range(TURNS)])
    server = start("--model-path", str(folder), "--trust-remote-code", "--model-aliases", "claude-*")
    yield server
    stop(server)


def assert_cached(usages: list[tuple[int, int, int]]) -> None:
    """usages: (tokens of the prompt, of them cached, tokens of the answer) of each request."""
    assert len(usages) == TURNS + 1
    for (prompt, _, answer), (_, cached, _) in pairwise(usages):
        assert cached >= prompt + answer - BLOCK


@pytest.mark.parametrize("family", FAMILIES)
def test_claude_code(tmp_path: Path, family: str) -> None:
    """The call has an argument that the client would put before the others if it were left out."""
    claude, folder = installed("claude_code", "claude"), work_folder(tmp_path)
    (folder / GREETING).write_text(f"{line(0)}\n")
    edit = {"replace_all": False, "file_path": str(folder / GREETING), "old_string": "{old}", "new_string": "{new}"}
    with reciting(family, tmp_path / "model", "Edit", **edit) as server:
        told = told_by_claude(
            claude,
            server,
            folder,
            *("--max-turns", str(TURNS + 1), "--permission-mode", "acceptEdits"),
            f"Count @{GREETING} up from {line(0)}, in steps of one.",
            ANTHROPIC_AUTH_TOKEN="none",
            CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT),
        )
    assert (folder / GREETING).read_text() == f"{line(TURNS)}\n"
    messages = [check(events) for events in messages_in(told)]
    usages = [message["usage"] for message in messages]
    spent = [(sent["prompt_tokens"], used) for sent, used in zip(messages, usages, strict=True)]
    assert_cached([(n, used["cache_read_input_tokens"], used["output_tokens"]) for n, used in spent])
    assert all([block["type"] for block in message["content"]] == ["thinking", "tool_use"] for message in messages[:-1])
    assert (told[-1]["subtype"], told[-1]["result"]) == ("success", "Done.")


@pytest.mark.parametrize("family", FAMILIES)
def test_codex(tmp_path: Path, family: str) -> None:
    codex, folder = installed("codex", "codex"), work_folder(tmp_path)
    (folder / GREETING).write_text(f"{line(0)}\n")
    command = f"sed -i s/{{old}}/{{new}}/ {GREETING}"
    with (
        reciting(family, tmp_path / "model", "exec_command", cmd=command) as server,
        relaying(server.url) as relay,
    ):
        asked = f"Count {GREETING} up from {line(0)}, in steps of one."
        told = told_by_codex(codex, relay, folder, f"model_context_window = {CONTEXT}\n", asked)
    assert (folder / GREETING).read_text() == f"{line(TURNS)}\n"
    assert [item["exit_code"] for item in items(told, "command_execution")] == [0] * TURNS
    responses = [answered(exchange) for exchange in relay.exchanges]
    usages = [response["usage"] for response in responses]
    details = [(used["input_tokens_details"]["cached_tokens"], used["output_tokens"]) for used in usages]
    assert_cached([(used["input_tokens"], *each) for used, each in zip(usages, details, strict=True)])
    assert items(told, "agent_message")[-1]["text"] == "Done."
