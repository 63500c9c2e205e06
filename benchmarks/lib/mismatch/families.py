"""Gradients of tiny random models in bfloat16, of several kinds of layers, beside exact ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np

from benchmarks.lib.mismatch.agreement import Gradients, error, gradients, moved
from benchmarks.lib.mismatch.bases import cast
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.config import ModelConfig, OptimizerConfig, RLTrainingConfig
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.data import Datum, answered
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.trainer import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from family_checks import build

NAMES = ("llama", "gemma2", "qwen3_5", "mamba2", "rwkv7", "lfm2")
"""None with experts, whose products MLX computes in float32 only on a CPU."""
RANK, SIZE, SEEDS = 4, 0.05, 5


@dataclass(frozen=True, slots=True)
class FamilyError:
    """Norm of the difference of the gradient from that of the same weights in float32, relative to its norm: with the
    factors' products in bfloat16, and in float32. Medians of `SEEDS` batches."""

    name: str
    bfloat16: float
    float32: float


def measured(name: str) -> FamilyError:
    """Both errors of a family."""
    rounded = build(name)
    cast(rounded, mx.bfloat16)
    widened = copy.deepcopy(rounded)
    cast(widened, mx.float32)
    exact, half = _trainer(widened, mx.float32), _trainer(rounded, mx.bfloat16)
    batches, found = [_data(seed) for seed in range(SEEDS)], []
    wanted = [_gradients(exact, batch) for batch in batches]
    for dtype in (mx.bfloat16, mx.float32):
        half.model.dtype = dtype
        errors = [error(_gradients(half, batch), want) for batch, want in zip(batches, wanted, strict=True)]
        found.append(median(errors))
    return FamilyError(name, *found)


def _trainer(model: nn.Module, dtype: mx.Dtype) -> GRPOTrainer:
    plan, layout = prepare(model), adapter_layout(model)
    bank = AdapterBank(layout, 1, RANK, dtype)
    install_adapters(model, bank)
    settings = RLTrainingConfig(optimizer=OptimizerConfig(max_grad_norm=1e30, max_kl_step=None))
    targets = {spec.target for spec in layout.linears.values() if not (spec.chooses or spec.embedding)}
    lora = ModelConfig(lora_rank=RANK, lora_target_modules=tuple(sorted(targets)))
    trainable = TrainableModel(model, bank, plan, lambda *_: False)
    trainer = GRPOTrainer(trainable, settings.resolved(True, 256), lora, measure_kl=False)
    policy = trainer.open("one")
    policy.restore(replace(policy.state, params=moved(policy.params, SIZE)))
    return trainer


def _gradients(trainer: GRPOTrainer, data: Sequence[Datum]) -> Gradients:
    return gradients(trainer, trainer.policies["one"], data)


def _data(seed: int) -> list[Datum]:
    random = np.random.default_rng(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(0, 90, count))

    prompt = ids(12)
    return [answered(prompt, ids(12), advantage=float(random.normal())) for _ in range(6)]
