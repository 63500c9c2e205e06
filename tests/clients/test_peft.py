"""PEFT: reads exported adapters, and reward models, which are adapters for sequence classification, whoever has written
them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from clients.running import PYTHON, SCRIPTS, UV, Report, printed
from lora import layout_of, merged, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.formats import write_mlx_lm, write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.extras.reward_models.folder import RewardModelWeights, read_reward_model
from mlx_parallm.model.merge import export_adapter

ROWS = [[1, 5, 9, 33, 77, 2, 250, 100], [1, 5, 9, 33, 4], [7, 8]]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEAR = 1e-4


def test_both_give_the_same_rewards(tmp_path: Path, report: Report) -> None:
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    head = np.random.default_rng(2).normal(size=layout.hidden).astype(np.float32)
    ours = RewardModelWeights(random_adapter(layout, 1, targets=("q_proj", "down_proj")), head)
    write_peft(tmp_path / "ours", ours.adapter, layout, None, ours.head)
    folders = [str(tmp_path / name) for name in ("model", "ours", "theirs")]
    of_ours, of_theirs = with_peft("rewards", *folders)
    theirs = read_reward_model(tmp_path / "theirs", layout, max_rank=64)
    pairs = [*zip(rewards(ours), of_ours, strict=True), *zip(rewards(theirs), of_theirs, strict=True)]
    apart = max(abs(one - other) for one, other in pairs)
    report("peft: rewards of reward models here and there, x 1e-6", 1e6 * apart, limit=1e6 * NEAR)
    assert apart < NEAR


def test_an_exported_adapter_gives_the_same_logits(tmp_path: Path, report: Report) -> None:
    """Of ranks and scales that differ between linears."""
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    pairs = random_adapter(layout, 3, rank=6, targets=(*LINEARS, "lm_head")).pairs
    weights = AdapterWeights({
        path: LoRAPair(pair.a[:, : 2 + n % 5], pair.b[: 2 + n % 5], 2.0 - 0.25 * (n % 3))
        for n, (path, pair) in enumerate(pairs.items())
    })  # fmt: skip
    write_mlx_lm(tmp_path / "adapter", weights, layout)
    export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "peft", "peft", "org/base")
    theirs = with_peft("logits", str(tmp_path / "model"), str(tmp_path / "peft"))
    model = merged(tiny_model("llama"), weights)
    apart = max(
        np.abs(np.array(model(mx.array([row]))[0, -1]) - row_of).max() for row, row_of in zip(ROWS, theirs, strict=True)
    )
    report("peft: logits of an exported adapter here and there, x 1e-6", 1e6 * apart, limit=1e6 * NEAR)
    assert apart < NEAR


def with_peft(*arguments: str) -> Any:
    """What the script printed of the rows."""
    script = (*UV, "run", *PYTHON, "--script", str(SCRIPTS / "with_peft.py"))
    return json.loads(printed(*script, *arguments, json.dumps(ROWS)).splitlines()[-1])


def rewards(weights: RewardModelWeights) -> list[float]:
    model = merged(tiny_model("llama"), weights.adapter)
    return [(model.model(mx.array([row]))[0, -1] * mx.array(weights.head)).sum().item() for row in ROWS]
