"""Training over bases in 16 bits: products as the sampler computes them, and everything that adds up in float32."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from tiny import tiny_model
from trainers import (
    SETTINGS,
    gradients,
    learn,
    leaves,
    logprobs,
    make_policy,
    packed,
    samples,
    snapshot,
    trainer_of,
    unclipped,
)

from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

MOVED = 0.05


def trained_in(dtype: mx.Dtype, settings=SETTINGS) -> tuple[GRPOTrainer, nn.Module, Policy]:
    """A trainer over a tiny model whose weights were rounded to bfloat16, and which computes in `dtype`."""
    model = tiny_model("llama")
    for each in (mx.bfloat16, dtype):
        model.update(tree_map(lambda array, each=each: array.astype(each), model.parameters()))
    trainer, model = trainer_of(model, settings, dtype=dtype)
    return trainer, model, make_policy(trainer, MOVED)


def served_logprobs(trainer: GRPOTrainer, model: nn.Module, policy: Policy, sample) -> np.ndarray:
    """Those of the bank's forward pass, as a server computes them."""
    bank = trainer.model.bank
    for _ in bank.write(1, policy.weights()):
        pass
    with bank.forward([1], [len(sample.token_ids)]):
        logits = model(mx.array([sample.token_ids]))[0].astype(mx.float32)
    targets = mx.array([sample.token_ids[at] for at in sample.trained()])
    return np.array((logits - mx.logsumexp(logits, -1, keepdims=True))[mx.array(sample.trained()) - 1, targets])


def apart(trainer: GRPOTrainer, model: nn.Module, policy: Policy) -> float:
    """Mean difference of the logprobs of sampler and trainer, in nats."""
    found = []
    for sample in samples(8):
        trained = np.array(logprobs(trainer, packed([sample]), policy.params, policy.scale))
        found.append(np.abs(trained - served_logprobs(trainer, model, policy, sample)))
    return float(np.concatenate(found).mean())


def test_over_bfloat16_an_adapter_is_trained_as_it_is_served() -> None:
    """With the same rounding of the factors and of their products, nothing is left but the order of additions."""
    trainer, model, policy = trained_in(mx.bfloat16)
    as_served = apart(trainer, model, policy)
    trainer.model.dtype = mx.float32
    assert as_served < 0.1 * apart(trainer, model, policy)


def test_gradients_over_bfloat16_are_near_those_of_the_same_weights_in_float32() -> None:
    drawn = samples(8)
    got, want = (
        gradients(trainer, policy, drawn)
        for trainer, _, policy in (trained_in(dtype, unclipped()) for dtype in (mx.bfloat16, mx.float32))
    )
    apart = sum(float(np.square(got[name] - want[name]).sum()) for name in want)
    assert apart**0.5 < 0.1 * sum(float(np.square(each).sum()) for each in want.values()) ** 0.5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_factors_gradients_and_the_optimizer_stay_float32(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, policy = trained_in(dtype)
    seen, stepped = [], policy.stepped
    monkeypatch.setattr(
        policy, "stepped", lambda gradients, *rest: (seen.append(gradients), stepped(gradients, *rest))[1]
    )
    learn(trainer, policy, samples(8))
    trained = tree_flatten([seen, policy.params, policy.state.optimizer])
    assert {leaf.dtype for _, leaf in trained if leaf.ndim} == {mx.float32}


def test_over_bfloat16_an_update_that_is_made_again_is_the_same_to_the_bit() -> None:
    trainer, _, policy = trained_in(mx.bfloat16)
    saved = snapshot(policy)
    learn(trainer, policy, samples(8))
    once = leaves(policy)
    policy.restore(saved)
    learn(trainer, policy, samples(8))
    assert all(np.array_equal(leaf, once[name]) for name, leaf in leaves(policy).items())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_only_over_bfloat16_are_products_rounded(dtype: mx.Dtype) -> None:
    """float16 has too small a range for gradients."""
    trainer, _, _ = trained_in(dtype)
    assert trainer.model.dtype == mx.float32
