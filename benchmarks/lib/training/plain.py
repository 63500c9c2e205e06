"""The plain trainer with LoRA layers of all linears, as the benchmarks of training run it."""

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.nn as nn  # isort: skip
from lib.training.batch import GROUP, LORA
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_parallm.bench.plain_trainer import PlainTrainer

TARGETS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def plain_trainer(model: nn.Module) -> PlainTrainer:
    """A trainer of a model that has no adapters yet. A pass computes one group."""
    config = {"rank": LORA.rank, "scale": LORA.alpha / LORA.rank, "dropout": 0.0, "keys": TARGETS}
    linear_to_lora_layers(model, len(model.layers), config)
    return PlainTrainer(model, rows=GROUP)
