"""retrain: its own helper trains in PyTorch, and samples from the server over HTTP with its engine `mlx`; its engine
`openai` samples while adapters are saved."""

import json
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
from clients.running import SCRIPTS, UV, Report, printed
from main_job.serving import start, stop
from tiny import save_tiny

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


def test_the_engine_openai_gets_each_adapter_that_is_saved(tmp_path: Path, report: Report) -> None:
    """It names no adapter in its requests, and tells the server of the first one only."""
    model, saved = tmp_path / "model", tmp_path / "_live_adapter"
    save_tiny("llama", model)
    flags = ["--model-path", str(model), "--served-model-name", str(model), "--kv-cache-memory", "16MB"]
    server = start(*flags, "--serve-adapter-folder", str(saved))
    try:
        script = (*UV, "run", "--python", "3.12", "--script", str(SCRIPTS / "with_retrain.py"))
        apart = json.loads(printed(*script, server.url, str(model), str(saved)).splitlines()[-1])
    finally:
        stop(server)
    assert len(apart) == 4
    report("retrain: logprobs of its engine openai and PyTorch's, x 1e-6", 1e6 * max(apart), limit=100)
    assert max(apart) < 1e-4
