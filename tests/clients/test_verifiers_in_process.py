"""verifiers 0.4 with this package in one environment: its episodes are played in the process that trains.

The environments in `environments` are written as users of verifiers write them.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from clients.running import HERE, PYTHON, SCRIPTS, UV, Report, printed
from docs.pages import blocks_of

pytestmark = pytest.mark.timeout(3600)

ENVIRONMENTS, RECIPES = HERE / "environments", HERE.parents[1] / "examples" / "recipes"
WITH_VERIFIERS = (*UV, "run", *PYTHON, "--isolated", "--project", str(HERE.parents[1]), "--extra", "verifiers")
UPDATES, LEAST_GAIN = 12, 0.3
SETTINGS = {"prompts-per-step": 4, "group-size": 6, "max-tokens": 8, "learning-rate": 1e-3, "steps": UPDATES}


def run(*command: str) -> str:
    return printed(*WITH_VERIFIERS, *command, PYTHONPATH=f"{ENVIRONMENTS}{os.pathsep}{RECIPES}")


def played(environment: str, *answers: str | list[Any]) -> dict[str, Any]:
    output = run("python", str(SCRIPTS / "play_verifiers.py"), f"verifiers:{environment}", json.dumps(answers))
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.parametrize("environment", ["one_thing", "two_things"])
def test_the_reward_rises(environment: str, tmp_path: Path, report: Report) -> None:
    """In `mlx_parallm_train` on the bundled model: from the first update, whose samples are of the base model, to the
    mean of the last two."""
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    log = tmp_path / "metrics.jsonl"
    named = ("--environment", f"verifiers:{environment}", "--checkpoint-dir", str(tmp_path / "run"), "--log", str(log))
    run("mlx_parallm_train", *named, *flags)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    assert len(rewards) == UPDATES
    gain = fmean(rewards[-2:]) - rewards[0]
    report(f"verifiers in the process, {environment}: reward of the first update", rewards[0])
    name = f"verifiers in the process, {environment}: gain of the last two of {UPDATES} updates"
    report(name, gain, limit=LEAST_GAIN, at_least=True)
    assert gain >= LEAST_GAIN, rewards


def test_the_environment_of_the_tutorial(tmp_path: Path) -> None:
    """As its page shows it: the files, then the command."""
    blocks = blocks_of("docs/environments.md")
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (command,) = (block for block in blocks if "--extra verifiers" in block.text)
    _, _, trained = command.text.partition("--extra verifiers ")
    printed(*WITH_VERIFIERS, *shlex.split(trained), "--run", "trained", at=tmp_path, PYTHONPATH=".")
    lines = (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()
    assert sum("reward_mean" in json.loads(line) for line in lines) == 3


def test_the_second_turn_repeats_the_first_and_its_answer() -> None:
    """Word for word, so that it continues the tokens that were drawn."""
    result = played("two_things", "Green", " red, or blue")
    first, second = (turn["messages"] for turn in result["asked"])
    assert first == [{"role": "user", "content": "Name a color."}]
    assert second == [
        *first,
        {"role": "assistant", "content": "Green"},
        {"role": "user", "content": "Name another color."},
    ]
    assert result["reward"] == pytest.approx((2 + 1 + 1 / 3) / 4)


def test_a_tool_of_the_environment_runs_and_its_result_is_shown() -> None:
    name = "fourth"
    result = played("secret_number", ["safe_open_drawer", {"name": name}], ["open", {}], "I found 111, 555 and 666.")
    assert [turn["tools"] for turn in result["asked"]] == [["safe_open_drawer"]] * 3
    said = result["asked"][-1]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant", "tool"]
    assert said[1]["tool_calls"][0]["function"] == {"name": "safe_open_drawer", "arguments": {"name": name}}
    assert said[2]["content"] == str(len(name) * 111)
    assert said[4]["content"] == "error: there is no tool open"
    assert result["reward"] == 1.0
