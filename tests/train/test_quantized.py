"""QLoRA: adapters of a base model whose weights stay 4-bit are trained as over the same weights as dense arrays.

On a CPU a server makes quantized weights dense when it loads them, so this is about the arithmetic alone.
"""

from __future__ import annotations

import copy

import mlx.nn as nn
import pytest
from configs import changed, loss_config
from family_checks import CONFIGURATIONS, random_model
from mlx_lm.utils import dequantize_model, quantize_model
from tiny import tiny_config, tiny_model
from trainers import (
    LORA,
    assert_close,
    gradients,
    make_policy,
    samples,
    trainer_of,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.packing import dequantize
from mlx_parallm.train.trainer import GRPOTrainer


def both(checkpointed: bool, tied: bool, algorithm: Algorithm) -> list[tuple[GRPOTrainer, nn.Module]]:
    """A trainer over 4-bit weights, embedding and head among them, and one over the same weights made dense."""
    packed_model = tiny_model("llama", tie_word_embeddings=tied)
    nn.quantize(packed_model, group_size=32, bits=4)
    dense = dequantize_model(copy.deepcopy(packed_model))
    settings = unclipped(
        gradient_checkpointing=checkpointed, loss=loss_config(algorithm=algorithm, entropy_coef=0.1, kl_coef=0.1)
    )
    return [trainer_of(model, settings) for model in (packed_model, dense)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.CROSS_ENTROPY])
def test_gradients_equal_those_over_the_dense_weights(checkpointed: bool, tied: bool, algorithm: Algorithm) -> None:
    (quantized, _), (dense, _) = both(checkpointed, tied, algorithm)
    drawn = samples(6)
    want = gradients(dense, make_policy(dense, moved=0.05), drawn)
    assert_close(gradients(quantized, make_policy(quantized, moved=0.05), drawn), want, 1e-5)


PACKINGS = [pytest.param("affine", bits, 32, marks=() if bits == 4 else pytest.mark.ci) for bits in (2, 3, 4, 5, 6, 8)]
PACKINGS += [
    pytest.param(*each, marks=pytest.mark.ci) for each in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))
]
FAMILIES = {
    "llama": tiny_config("llama"),
    "gpt_oss": CONFIGURATIONS["gpt_oss"],
    "deepseek_v3": {**CONFIGURATIONS["deepseek_v3"], "kv_lora_rank": 64, "qk_nope_head_dim": 64},
    "qwen3_5": CONFIGURATIONS["qwen3_5"],
}
"""Linears, experts with biases, a matrix for each head, and a delta rule."""


@pytest.mark.parametrize(("mode", "bits", "size"), PACKINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bases_of_every_packing_train(name: str, mode: str, bits: int, size: int) -> None:
    quantized, _ = quantize_model(random_model(FAMILIES[name]), FAMILIES[name], size, bits, mode=mode)
    dense = copy.deepcopy(quantized)
    dequantize(dense)
    targets = {spec.target for spec in adapter_layout(dense).linears.values() if not (spec.chooses or spec.embedding)}
    lora = changed(LORA, lora_target_modules=tuple(sorted(targets)))
    drawn, settings = samples(4), unclipped(gradient_checkpointing=True)
    both = [trainer_of(model, settings, lora, measure_kl=False)[0] for model in (quantized, dense)]
    got, want = (gradients(trainer, make_policy(trainer, moved=0.05), drawn) for trainer in both)
    assert_close(got, want, 1e-4)
