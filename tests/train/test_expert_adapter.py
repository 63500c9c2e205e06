"""Training adapters of experts, routers and shared experts, against models with the adapter in their weights."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from mlx.utils import tree_flatten
from tiny import tiny_model
from trainers import (
    LORA,
    SETTINGS,
    assert_close,
    gradients,
    make_policy,
    make_trainer,
    samples,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.errors import AdapterTooLargeError
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum

EXPERTS = changed(LORA, lora_target_modules=("gate_proj", "up_proj", "down_proj", "gate", "q_proj"))
ALL = changed(EXPERTS, lora_target_modules=(*EXPERTS.lora_target_modules, "shared_expert_gate"))


def merged_gradients(family: str, params: Params, scale: float, drawn: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Of −Σ logπ / ΣT, by forwards of mlx-lm's own model, each of whose weights is W + scale · (a b)ᵀ."""
    model, total = tiny_model(family), sum(len(sample.trained()) for sample in drawn)
    modules = dict(model.named_modules())
    weights = {path: modules[path].weight for path in params}

    def plain(factors: Params) -> mx.array:
        for path, pair in factors.items():
            modules[path].weight = weights[path] + scale * (pair["a"] @ pair["b"]).swapaxes(-1, -2)
        value = mx.array(0.0)
        for sample in drawn:
            logits = model(mx.array([sample.token_ids]))[0]
            logp = logits - mx.logsumexp(logits, -1, keepdims=True)
            targets = mx.array([sample.token_ids[at] for at in sample.trained()])
            value = value - logp[mx.array(sample.trained()) - 1, targets].sum() / total
        return value

    return {name: np.array(leaf) for name, leaf in tree_flatten(mx.grad(plain)(params))}


@pytest.mark.parametrize(("family", "lora"), [("qwen3_moe", EXPERTS), ("qwen2_moe", ALL), ("mixtral", EXPERTS)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_merged_weights(family: str, lora, checkpointed: bool) -> None:
    """With enough tokens for `SwitchGLU` to sort them in a micro-step, though not in each forward of one sample."""
    settings = unclipped(gradient_checkpointing=checkpointed, loss=loss_config(algorithm=Algorithm.CROSS_ENTROPY))
    trainer, _ = make_trainer(settings, family, lora)
    policy, drawn = make_policy(trainer, moved=0.05), samples(6)
    got = gradients(trainer, policy, drawn)
    assert any("switch_mlp" in name for name in got)
    assert_close(got, merged_gradients(family, policy.params, policy.scale, drawn), 1e-5)


def test_a_policy_that_memory_cannot_hold_is_refused_with_its_size() -> None:
    trainer, _ = make_trainer(SETTINGS, "qwen3_moe", EXPERTS)
    layers, rank, experts, inside, hidden, queries = 2, 4, 4, 32, 64, 64
    numbers = layers * rank * (3 * experts * (inside + hidden) + (hidden + experts) + (hidden + queries))
    trainer.memory = 16 * numbers
    trainer.open("fits")
    trainer.memory -= 1
    with pytest.raises(AdapterTooLargeError, match=f"needs {16 * numbers / 1024:.1f} KiB"):
        trainer.open("does not")
