"""PEFT: reward models are folders of its adapters for sequence classification, whoever has written them."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from clients.running import PYTHON, SCRIPTS, UV, Report, printed
from lora import layout_of, merged, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.extras.reward_models.folder import RewardModelWeights, read_reward_model

ROWS = [[1, 5, 9, 33, 77, 2, 250, 100], [1, 5, 9, 33, 4], [7, 8]]
NEAR = 1e-4


def test_both_give_the_same_rewards(tmp_path: Path, report: Report) -> None:
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    head = np.random.default_rng(2).normal(size=layout.hidden).astype(np.float32)
    ours = RewardModelWeights(random_adapter(layout, 1, targets=("q_proj", "down_proj")), head)
    write_peft(tmp_path / "ours", ours.adapter, layout, None, ours.head)
    folders = [str(tmp_path / name) for name in ("model", "ours", "theirs")]
    script = (*UV, "run", *PYTHON, "--script", str(SCRIPTS / "with_peft.py"))
    of_ours, of_theirs = json.loads(printed(*script, *folders, json.dumps(ROWS)).splitlines()[-1])
    theirs = read_reward_model(tmp_path / "theirs", layout, max_rank=64)
    pairs = [*zip(rewards(ours), of_ours, strict=True), *zip(rewards(theirs), of_theirs, strict=True)]
    apart = max(abs(one - other) for one, other in pairs)
    report("peft: rewards of reward models here and there, x 1e-6", 1e6 * apart, limit=1e6 * NEAR)
    assert apart < NEAR


def rewards(weights: RewardModelWeights) -> list[float]:
    model = merged(tiny_model("llama"), weights.adapter)
    return [(model.model(mx.array([row]))[0, -1] * mx.array(weights.head)).sum().item() for row in ROWS]
