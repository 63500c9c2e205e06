"""QLoRA: adapters of a base model whose weights stay 4-bit are trained as over the same weights as dense arrays.

On a CPU a server makes quantized weights dense when it loads them, so this is about the arithmetic alone.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from configs import changed
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from tiny import tiny_model
from trainers import (
    assert_close,
    gradients,
    learn,
    logprobs,
    make_policy,
    packed,
    plain_logprobs,
    samples,
    trainer_of,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.rl.learn.trainer import GRPOTrainer


def both(checkpointed: bool, tied: bool, algorithm: Algorithm) -> list[tuple[GRPOTrainer, nn.Module]]:
    """A trainer over 4-bit weights, embedding and head among them, and one over the same weights made dense."""
    packed_model = tiny_model("llama", tie_word_embeddings=tied)
    nn.quantize(packed_model, group_size=32, bits=4)
    dense = dequantize_model(copy.deepcopy(packed_model))
    settings = unclipped(gradient_checkpointing=checkpointed)
    settings = changed(settings, loss=changed(settings.loss, algorithm=algorithm, entropy_coef=0.1, kl_coef=0.1))
    return [trainer_of(model, settings) for model in (packed_model, dense)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.CROSS_ENTROPY])
def test_gradients_equal_those_over_the_dense_weights(checkpointed: bool, tied: bool, algorithm: Algorithm) -> None:
    (quantized, _), (dense, _) = both(checkpointed, tied, algorithm)
    drawn = samples(6)
    want = gradients(dense, make_policy(dense, moved=0.05), drawn)
    assert_close(gradients(quantized, make_policy(quantized, moved=0.05), drawn), want, 1e-5)


def test_logprobs_are_those_of_the_quantized_model_and_its_weights_stay_as_they_are() -> None:
    (trainer, model), _ = both(True, False, Algorithm.GRPO)
    policy, drawn = make_policy(trainer, moved=0.05), samples(4)
    before = {name: id(leaf) for name, leaf in tree_flatten(model.parameters())}
    assert any(leaf.dtype == mx.uint32 for _, leaf in tree_flatten(model.parameters()))
    got = logprobs(trainer, packed(drawn), policy.params, policy.scale)
    assert got.tolist() == pytest.approx(
        [value for sample in drawn for value in plain_logprobs(trainer, model, policy.params, sample)], abs=1e-4
    )
    assert not learn(trainer, policy, drawn).skipped
    assert {name: id(leaf) for name, leaf in tree_flatten(model.parameters())} == before
