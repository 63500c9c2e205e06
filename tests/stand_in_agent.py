"""A stand-in for Claude Code and Codex. It reads its address, key, model and headers where they do, asks the server,
and exits as a test says.

Run as a program: `stand_in_agent.py claude|codex ARGUMENTS`, with the plan of `install` in a variable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

PLAN = "STAND_IN_AGENT"
INTERRUPTED = 7
"""Its exit status after SIGINT, if it waits."""


def install(folder: Path, name: str, **plan: Any) -> dict[str, str]:
    """Writes the program to `folder` / bin. Returns the variables with which it is found there and follows the plan:
    `record`, a file for what it was given; `turns`, the number of requests; `status`, its exit status; `waits`, for a
    signal. Its home has settings."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
    program.chmod(0o755)
    home = folder / "home"
    for path, text in SETTINGS.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(home), PLAN: json.dumps({"record": str(folder / "record.json"), **plan})}


SETTINGS = {
    ".claude/settings.json": '{"model": "opus", "env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:1"}}\n',
    ".claude.json": '{"numStartups": 3}\n',
    ".codex/config.toml": 'model = "gpt-5"\nmodel_provider = "other"\n',
}
"""Of a user who works with other servers."""


def given(folder: Path) -> dict[str, Any]:
    """What the program was given: its `arguments` and `variables`."""
    read: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return read


class Claude:
    """Its settings are variables; those of --settings count more."""

    def __init__(self, arguments: list[str]) -> None:
        env = os.environ | json.loads(arguments[arguments.index("--settings") + 1])["env"]
        self.url = env["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true"
        lines = env.get("ANTHROPIC_CUSTOM_HEADERS", "").splitlines()
        self.headers = {"Authorization": f"Bearer {env['ANTHROPIC_AUTH_TOKEN']}"} | dict(
            line.split(": ", 1) for line in lines
        )
        self.model = env["ANTHROPIC_MODEL"]

    def body(self, history: list[Any]) -> dict[str, Any]:
        system = [{"type": "text", "text": "You edit files.", "cache_control": {"type": "ephemeral"}}]
        return {"model": self.model, "max_tokens": 8, "system": system, "messages": history}

    def answer(self, response: dict[str, Any]) -> list[Any]:
        return [{"role": "assistant", "content": response["content"]}]


class Codex:
    """Its settings are values of -c."""

    def __init__(self, arguments: list[str]) -> None:
        lines = [value for flag, value in pairwise(arguments) if flag == "-c"]
        settings = tomllib.loads("\n".join(lines))
        provider = settings["model_providers"][settings["model_provider"]]
        assert provider["wire_api"] == "responses"
        self.url = provider["base_url"] + "/responses"
        key = os.environ[provider["env_key"]]
        self.headers = {"Authorization": f"Bearer {key}"} | provider.get("http_headers", {})
        self.model = settings["model"]

    def body(self, history: list[Any]) -> dict[str, Any]:
        input_ = [{"type": "message", **message} if "role" in message else message for message in history]
        return {"model": self.model, "instructions": "You edit files.", "input": input_, "max_output_tokens": 16}

    def answer(self, response: dict[str, Any]) -> list[Any]:
        return list(response["output"])


def main(name: str, arguments: list[str]) -> int:
    plan = json.loads(os.environ[PLAN])
    client = {"claude": Claude, "codex": Codex}[name](arguments)
    history: list[Any] = []
    for turn in range(plan.get("turns", 0)):
        import httpx

        history.append({"role": "user", "content": f"Go on, {turn}."})
        answer = httpx.post(client.url, json=client.body(history), headers=client.headers, timeout=60)
        if answer.is_error:
            print(answer.text, file=sys.stderr)
            return 99
        history += client.answer(answer.json())
    if plan.get("waits"):
        signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    record = Path(plan["record"])
    record.with_suffix(".part").write_text(json.dumps({"arguments": arguments, "variables": dict(os.environ)}))
    record.with_suffix(".part").rename(record)
    while plan.get("waits"):
        signal.pause()
    status: int = plan.get("status", 0)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
