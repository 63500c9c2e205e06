"""What an update writes takes the place of what it needs no more."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from configs import changed
from few_operations import growth
from mlx.utils import tree_map
from trainers import LORA, make_policy, make_trainer

from mlx_parallm.train.accumulation import Accumulated
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer


def learning_with(layers: int) -> tuple[GRPOTrainer, Policy]:
    """Large factors of a tiny model, so that little else takes memory."""
    trainer, _ = make_trainer(lora=changed(LORA, lora_rank=256), measure_kl=False, num_hidden_layers=layers)
    return trainer, make_policy(trainer, moved=0.1)


@pytest.fixture
def learning() -> tuple[GRPOTrainer, Policy]:
    return learning_with(layers=2)


def gradients_of(policy: Policy) -> Any:
    found = tree_map(lambda leaf: mx.ones(leaf.shape) / 8, policy.params)
    mx.eval(found)
    return found


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_a_step_takes_no_memory_besides_the_new_state(
    learning: tuple[GRPOTrainer, Policy], max_grad_norm: float
) -> None:
    """Gradients, clipped or not, and intermediate arrays are no more than the gradients were."""
    trainer, policy = learning
    accumulated = Accumulated(gradients_of(policy))
    with growth() as grown:
        accumulated.clip(max_grad_norm)
        after = policy.stepped(accumulated.take(), trainer.config.optimizer)
        for stage in after.stages():
            stage.launch()
        mx.eval(after.params, after.optimizer)
    assert after.step == 1
    assert grown.nbytes < policy.nbytes
