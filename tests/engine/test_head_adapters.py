"""Adapters of the output head, in one batch with others: each row equals its adapter merged into the base."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.nn as nn
import pytest
from lora import every_target, layout_of, random_adapter
from mixed_batch import assert_logprobs, changed_by
from tiny import tiny_model

from mlx_parallm.adapters.weights import AdapterWeights

pytestmark = pytest.mark.ci

NEAR = 1e-4
"""Of logprobs: a tied random model's logits reach ±70, where float32 is good for 4e-6 of them."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2, tied": ("qwen2", {}),
    "gemma2, tied, with attention of its own": ("gemma2", {}),
    "gemma3, in a language part": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def model_of(name: str) -> nn.Module:
    family, config = MODELS[name]
    return tiny_model(family, **config)


def adapters_of(model: nn.Module) -> dict[str, AdapterWeights]:
    """With and without the head, of different ranks and scales."""
    layout = layout_of(model)
    return {
        "head": random_adapter(layout, 1, rank=3, targets=("lm_head",), size=1.0, scale=0.5),
        "all": random_adapter(layout, 2, rank=8, targets=every_target(layout)),
        "layers": random_adapter(layout, 3, rank=2),
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(name: str) -> None:
    """Merged, a tied model's embedding looks tokens up as before."""
    model = partial(model_of, name)
    changed = changed_by(model, adapters_of(model()), 8)
    assert changed["head"], "an adapter of the head alone is to change what the base says"


@pytest.mark.parametrize("name", ["llama", "tied llama", "gemma2, tied, with attention of its own"])
def test_logprobs_of_prompts_and_answers_are_the_rows_own(name: str) -> None:
    """Rows with and without a head adapter are scored and drawn from in the same forward passes."""
    assert_logprobs(partial(model_of, name), adapters_of(model_of(name)), 4, NEAR)
