"""The training loops of the Tinker cookbook, unmodified, with `TINKER_BASE_URL`: their tokenizer and data are local.

The server needs the extra `tinker`: without it, the tests are skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from clients.running import PYTHON, SCRIPTS, UV, Report, printed
from main_job.serving import start, stop

pytest.importorskip("tinker", reason="the extra tinker is missing")

pytestmark = pytest.mark.timeout(1900)

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "one_word" / "tasks.jsonl"


def curves(folder: Path, part: str) -> dict[str, Any]:
    """What a loop has logged. TINKER_COOKBOOK_PYTHON may name an environment with the cookbook."""
    tokenizer = folder / "tokenizer"
    printed(PYTHON[1], "-m", "mlx_parallm", "tokenizer", "save", str(tokenizer), at=ROOT)
    there = os.environ.get("TINKER_COOKBOOK_PYTHON")
    python = [there] if there else [*UV, "run", *PYTHON, "--script"]
    script = [*python, str(SCRIPTS / "with_tinker_cookbook.py"), "base-model", str(tokenizer), str(TASKS), str(folder)]
    server = start("--enable-rl-training", "--checkpoint-dir", str(folder / "run"))
    try:
        said = printed(*script, part, TINKER_BASE_URL=server.url)
        assert server.get("/api/v1/sessions") == {"sessions": []}, "the loop has ended its session"
    finally:
        stop(server)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found[part]


def test_supervised_learning_lowers_the_loss(tmp_path: Path, report: Report) -> None:
    found = curves(tmp_path, "supervised")
    losses, held_out = found["train_mean_nll"], found["test/nll"]
    assert len(losses) == 9
    report("cookbook: loss after 9 supervised updates / before", losses[-1] / losses[0], limit=0.2)
    report("cookbook: held-out loss after / before", held_out[-1] / held_out[0], limit=0.2)
    assert losses[-1] < 0.2 * losses[0], losses
    assert held_out[-1] < 0.2 * held_out[0], held_out


def test_reinforcement_learning_raises_the_reward(tmp_path: Path, report: Report) -> None:
    found = curves(tmp_path, "reinforced")
    rewards = found["env/all/reward/total"]
    assert len(rewards) == 8
    gain = fmean(rewards[-3:]) - fmean(rewards[:3])
    report("cookbook: gain of the last three of 8 updates over the first three", gain, limit=0.1, at_least=True)
    assert gain >= 0.1, rewards
    kl = max(map(abs, found["optim/kl_sample_train_v1"]))
    report("cookbook: KL of the sampler and the trainer, x 1e-6", 1e6 * kl, limit=1000)
    assert kl < 1e-3, "the sampler and the trainer agree"
