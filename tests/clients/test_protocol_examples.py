"""The examples of `examples/protocols`: each runs as its page says, and its rewards rise."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from clients.running import EXAMPLES, PYTHON, UV, Report, printed
from main_job.serving import Server, start, stop

HTTPX, OPENAI = "httpx==0.28.1", "openai==3.54.0"
PACKAGES = {
    "agent/agent.py": (OPENAI,),
    "reasoning_gym/train.py": (OPENAI, "reasoning-gym==0.1.25"),
    "textarena/play.py": (OPENAI, "textarena==0.7.4"),
}
"""What each of them imports, besides httpx."""

LEAST_GAIN = 0.05
WITH_TINKER = pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="the extra tinker is missing")

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A new one for each example, with no updates but those that are asked for."""
    running = start("--enable-rl-training", "--learning-rate", "1e-3", "--checkpoint-dir", str(tmp_path / "run"))
    running.post("/v1/training/pause")
    yield running
    stop(running)


def curve(output: str, figure: str) -> list[float]:
    """What an example has printed, by update."""
    values = [float(value) for value in re.findall(rf"^update \d+: {figure} ([\d.]+)", output, re.MULTILINE)]
    assert len(values) >= 6, output
    return values


def check_curve(output: str, name: str, report: Report) -> None:
    """The mean reward of the last two updates is above that of the first, whose samples are of the base model."""
    rewards = curve(output, "reward")
    gain = fmean(rewards[-2:]) - rewards[0]
    report(f"{name}: reward of the first update", rewards[0])
    report(f"{name}: gain of the last two of {len(rewards)} updates", gain, limit=LEAST_GAIN, at_least=True)
    assert gain >= LEAST_GAIN, output


@pytest.mark.parametrize("program", PACKAGES)
def test_rewards_rise(server: Server, program: str, report: Report) -> None:
    """In an environment that has the client's packages and nothing of this server."""
    packages = [part for package in (HTTPX, *PACKAGES[program]) for part in ("--with", package)]
    command = (*UV, "run", *PYTHON, "--isolated", "--no-project", *packages, "python", program, server.url)
    check_curve(printed(*command, at=EXAMPLES), program.partition("/")[0], report)


@pytest.mark.parametrize("program", ["trl/rollouts.py", "verifiers/train.py"])
def test_an_example_brings_its_own_server(program: str, report: Report) -> None:
    check_curve(printed(sys.executable, program, at=EXAMPLES), program.partition("/")[0], report)


@WITH_TINKER
def test_rewards_rise_with_tinkers_sdk(report: Report) -> None:
    check_curve(printed(sys.executable, "tinker/rl.py", at=EXAMPLES), "tinker", report)


@WITH_TINKER
def test_the_loss_falls_with_tinkers_sdk(report: Report) -> None:
    output = printed(sys.executable, "tinker/sl.py", at=EXAMPLES)
    losses = curve(output, "loss")
    report("tinker: loss of the first update", losses[0])
    report(f"tinker: its share after {len(losses)} updates", losses[-1] / losses[0], limit=0.2)
    assert losses[-1] < 0.2 * losses[0], losses
    found = re.search(r"held-out questions: (\d+) before, (\d+) after", output)
    assert found is not None
    assert int(found[2]) > int(found[1]), output
