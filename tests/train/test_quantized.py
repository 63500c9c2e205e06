"""QLoRA: adapters of a base model whose weights stay 4-bit are trained as over the same weights as dense arrays.

On a CPU a server makes quantized weights dense when it loads them, so this is about the arithmetic alone.
"""

from __future__ import annotations

import copy

import pytest
from configs import changed
from family_checks import CONFIGURATIONS, random_model
from mlx_lm.utils import quantize_model
from tiny import tiny_config
from trainers import (
    LORA,
    assert_close,
    gradients,
    make_policy,
    samples,
    trainer_of,
    unclipped,
)

from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.packing import dequantize

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
