"""The examples of `examples/protocols`: each runs as its page says, and its rewards rise."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
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

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def server() -> Iterator[Server]:
    """A new one for each example, with no updates but those that are asked for."""
    running = start("--enable-rl-training", "--learning-rate", "1e-3")
    running.post("/v1/training/pause")
    yield running
    stop(running)


def check_curve(output: str, name: str, report: Report) -> None:
    """The mean reward of the last two updates is above that of the first, whose samples are of the base model."""
    rewards = [float(value) for value in re.findall(r"^update \d+: reward ([\d.]+)", output, re.MULTILINE)]
    assert len(rewards) >= 6, output
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
