"""retrain: its own helper trains in PyTorch, and samples from the server over HTTP with its engine `mlx`."""

import re
import sys
from pathlib import Path
from statistics import fmean

from clients.running import printed

EXAMPLE = Path(__file__).parents[2] / "examples" / "protocols" / "retrain" / "run.py"


def test_its_reward_climbs() -> None:
    said = printed(sys.executable, str(EXAMPLE), "--steps", "10")
    rewards = [float(found) for found in re.findall(r"reward (\d\.\d+)", said)]
    assert len(rewards) == 10
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.05
