"""README's recipes: each command as it stands there, with the default model and with a tiny random one of the family
that the page names. What changes is where the tokenizer of the cookbook's model is from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from clients.agents import installed
from clients.running import PYTHON, Report, asking_no_other_host
from docs.following import Reader
from docs.pages import ROOT, Block, blocks_of
from family_checks import CONFIGURATIONS, build
from tiny import save_directory

pytestmark = pytest.mark.timeout(3600)

PAGE = "README.md"
HUB_ID, RENDERER = "Qwen/Qwen3.5-4B", "qwen3_5_disable_thinking"
DEFAULT, TINY = "the default model", "a tiny one"
TASK = [{"role": "user", "content": "The cake was awful. Positive or negative?"}]
TEST = "def test_it():\n    assert open('date.txt').read() == '2026-11-29'\n"
LONG = 131_072
"""Tokens of the tiny model's context, whose tokens are bytes."""
OVERRIDES = "tml-renderers; python_version < '3'\n"
"""The cookbook's package of other models' renderers, which needs another index."""


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    """With the model that the test's parameter names."""
    overrides = tmp_path / "overrides.txt"
    overrides.write_text(OVERRIDES)
    variables = {"HF_HUB_OFFLINE": "1", "UV_OVERRIDE": str(overrides)}
    if request.param == TINY:
        config = CONFIGURATIONS["qwen3_5"] | {"max_position_embeddings": LONG}
        save_directory(build("qwen3_5"), config, tmp_path / "model")
        variables |= {
            "MLX_PARALLM_MODEL__BASE_MODEL_PATH": str(tmp_path / "model"),
            "MLX_PARALLM_MODEL__CHAT_TEMPLATE_KWARGS": '{"enable_thinking": false}',
        }
    made = Reader(tmp_path, shared=False, variables=variables)
    yield made
    made.close()


with_both = pytest.mark.parametrize(("reader", "model"), [(DEFAULT, DEFAULT), (TINY, TINY)], indirect=["reader"])


def recipe(number: int) -> list[Block]:
    """The commands of one."""
    lines = (ROOT / PAGE).read_text().splitlines()
    begins = [at for at, line in enumerate(lines, 1) if line.startswith((f"**{number}. ", f"**{number + 1}. ", "## "))]
    first = next(at for at in begins if lines[at - 1].startswith(f"**{number}. "))
    after = next(at for at in begins if at > first)
    return [block for block in blocks_of(PAGE) if first < block.line < after]


def column(file: Path, name: str) -> list[float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def report_curve(report: Report, name: str, values: list[float]) -> None:
    """Five points of it: those of the first and the last update, and between."""
    for at in (round(part * (len(values) - 1)) for part in (0, 0.25, 0.5, 0.75, 1)):
        report(f"{name} of update {at + 1}", values[at])


@with_both
def test_from_a_file_to_rewards_to_a_server(model: str, tmp_path: Path, reader: Reader, report: Report) -> None:
    (commands,) = recipe(1)
    reader.run(commands, {})
    said = httpx.post(f"{reader.url}/v1/chat/completions", json={"messages": TASK, "max_tokens": 12}, timeout=60).json()
    losses = column(tmp_path / "runs" / "taught" / "metrics.jsonl", "loss")
    rewards = column(tmp_path / "runs" / "better" / "metrics.jsonl", "reward_mean")
    assert len(rewards) == 15
    if model == DEFAULT:
        report("recipe 1: loss of the last update on the file / of the first", losses[-1] / losses[0], limit=1.0)
        report_curve(report, "recipe 1: reward", rewards)
        report("recipe 1: reward of the last three of 15", fmean(rewards[-3:]), limit=0.7, at_least=True)
        assert losses[-1] < losses[0]
        assert fmean(rewards[-3:]) >= 0.7, rewards
        assert said["choices"][0]["message"]["content"].strip().lower() == "negative"


@with_both
def test_an_environment_of_verifiers(model: str, tmp_path: Path, reader: Reader, report: Report) -> None:
    uv = f"{shutil.which('uv')} run --quiet {' '.join(PYTHON)} --isolated --project {ROOT}"
    reader.run(recipe(2)[0], {"uv run": uv})
    rewards = column(tmp_path / "runs" / "verifiers" / "metrics.jsonl", "reward_mean")
    assert len(rewards) == 20
    if model == DEFAULT:
        gain = fmean(rewards[-2:]) - rewards[0]
        report_curve(report, "recipe 2: reward", rewards)
        report("recipe 2: gain of the last two of 20 updates", gain, limit=0.3, at_least=True)
        assert gain >= 0.3, rewards


@with_both
def test_a_loop_of_the_cookbook(model: str, tmp_path: Path, reader: Reader) -> None:
    """Sums are beyond the default model: that the loop learns is shown by `test_tinker_cookbook.py`."""
    pytest.importorskip("tinker", reason="the extra tinker is missing")
    changes = {HUB_ID: "tokenizer", RENDERER: "qwen3_instruct", "max_steps=20": "max_steps=3"}
    path = ["--model-path", str(tmp_path / "model")] if model == TINY else []
    save = (sys.executable, "-m", "mlx_parallm", "tokenizer", "save", "tokenizer", *path)
    subprocess.run(save, cwd=tmp_path, check=True)
    _, serve, loop = recipe(2)
    reader.run(serve, changes)
    reader.run(loop, changes)
    assert len(column(tmp_path / "runs" / "math" / "metrics.jsonl", "env/all/reward/total")) == 3


@pytest.mark.parametrize("reader", [TINY], indirect=True)
def test_an_agent_that_learns(tmp_path: Path, reader: Reader) -> None:
    """The tiny model's tokens are bytes, so it needs a longer context. No attempt is right, so nothing is learnt from
    them; what the default model learns, with a prompt that it has room for, is shown by `test_launch.py`."""
    serve, attempts = recipe(3)
    reader.run(serve, {"32768": str(LONG)})
    project, claude = tmp_path / "project", Path(installed("claude_code", "claude")).parent
    project.mkdir()
    (project / "test_date.py").write_text(TEST)
    git = "git -c user.name=a -c user.email=a@b.c"
    subprocess.run(["bash", "-c", f"git init -q && git add . && {git} commit -qm begun"], cwd=project, check=True)
    with asking_no_other_host() as proxied:
        variables = {**proxied, "HOME": str(tmp_path), "PATH": f"{claude}{os.pathsep}$PAGES_BIN{os.pathsep}$PATH"}
        here = " ".join(f"{name}={value}" for name, value in variables.items())
        launch = "launch claude-code"
        reader.run(attempts, {"for ": f"cd project; export {here}\nfor ", launch: f"{launch} --url {reader.url}"})
    group = httpx.get(f"{reader.url}/v1/training/trajectories/fix-the-date").json()
    assert [(member["reward"], len(member["turns"]) >= 1) for member in group["members"]] == [(0.0, True)] * 4
