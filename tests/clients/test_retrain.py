"""retrain: its own helper trains in PyTorch, and samples from the server over HTTP with its engine `mlx`."""

import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
from clients.running import Report, printed

EXAMPLE = Path(__file__).parents[2] / "examples" / "protocols" / "retrain" / "run.py"
LEAST_GAIN = 0.05

pytestmark = pytest.mark.timeout(1800)


def test_its_reward_climbs(report: Report) -> None:
    said = printed(sys.executable, str(EXAMPLE), "--steps", "10")
    rewards = [float(found) for found in re.findall(r"reward (\d\.\d+)", said)]
    assert len(rewards) == 10
    gain = fmean(rewards[-2:]) - rewards[0]
    report("retrain: reward of the first step", rewards[0])
    report("retrain: gain of the last two of 10 steps", gain, limit=LEAST_GAIN, at_least=True)
    assert gain >= LEAST_GAIN
