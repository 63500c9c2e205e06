"""A reward model's arithmetic on the tiny model: rewards, the loss, and gradients of head and adapter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from configs import changed
from mlx.utils import tree_flatten
from trainers import LORA, SETTINGS, VOCABULARY, assert_close, everywhere, make_trainer

from mlx_parallm.config import OptimizerConfig
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.extras.reward_models.fitting import RewardModelInTraining
from mlx_parallm.extras.reward_models.model import HEAD, RewardModel, preference_loss
from mlx_parallm.extras.reward_models.preferences import Preference
from mlx_parallm.extras.reward_models.work import scored, stepped
from mlx_parallm.train.trainer import GRPOTrainer

FAMILIES = ("llama", "qwen3", "gemma3")
NEAR = 1e-4


class Recorder(RewardModelInTraining):
    """Keeps the gradients in place of applying them."""

    def step(self, gradients: Any) -> None:
        self.seen = {name: np.array(leaf) for name, leaf in tree_flatten(gradients)}


def made(family: str = "llama", tokens: int = 64, checkpointed: bool = False, **config: Any):
    settings = changed(SETTINGS, gradient_checkpointing=checkpointed, micro_batch_tokens=tokens)
    trainer, model = make_trainer(settings, family, **config)
    return trainer, model


def moved(trainer: GRPOTrainer, seed: int = 5, size: float = 0.05) -> RewardModel:
    """A new reward model with random numbers in place of the zeros of b and of the head."""
    new, random = RewardModel.new(trainer.model.layout, LORA, 0), np.random.default_rng(seed)

    def noise(leaf: mx.array) -> mx.array:
        return mx.array(random.normal(size=leaf.shape, scale=size), mx.float32)

    params = {
        path: {"weight": noise(pair["weight"])} if path == HEAD else {"a": pair["a"], "b": noise(pair["b"])}
        for path, pair in new.params.items()
    }
    return replace(new, params=params)


def pairs(count: int = 5, seed: int = 0) -> list[Preference]:
    random = np.random.default_rng(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(0, VOCABULARY, random.integers(least, most)))

    prompts = [ids(3, 9) for _ in range(2)]
    return [Preference(prompts[at % 2], ids(1, 7), ids(1, 7)) for at in range(count)]


def score(trainer: GRPOTrainer, model: RewardModel, rows: Any) -> Any:
    return trainer.run(scored(trainer, model, rows))


def step(trainer: GRPOTrainer, training: RewardModelInTraining, data: list[Preference]) -> Any:
    return trainer.run(stepped(trainer, training, data))


def finished(trainer: GRPOTrainer, future):
    while trainer.waits():
        trainer.advance()
    return future.result(timeout=0)


def plain_reward(trainer: GRPOTrainer, model, params, scale: float, row: tuple[int, ...]) -> mx.array:
    """From the served model's own trunk over one unpadded row."""
    trunk = getattr(model, "language_model", model).model
    with trainer.model.bank.using(everywhere(params, scale)):
        hidden = trunk(mx.array([row]))
    return (hidden[0, -1].astype(mx.float32) * params[HEAD]["weight"]).sum()


# ---- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_are_the_head_times_the_last_hidden_state(family: str) -> None:
    """Of rows of several lengths, some of which share a prompt, in several batches."""
    trainer, model = made(family, tokens=24)
    reward_model = moved(trainer)
    rows = [row for pair in pairs() for row in (pair.chosen, pair.rejected)]
    got = finished(trainer, score(trainer, reward_model, rows))
    want = [plain_reward(trainer, model, reward_model.params, reward_model.scale, row).item() for row in rows]
    assert got == pytest.approx(want, abs=NEAR)
    assert np.std(want) > 100 * NEAR


def test_a_new_reward_model_gives_zero_and_the_base_is_untouched() -> None:
    trainer, model = made()
    before = np.array(model(mx.array([[1, 2, 3]])))
    new = RewardModel.new(trainer.model.layout, LORA, 0)
    assert finished(trainer, score(trainer, new, [(1, 2, 3), (4,)])) == [0.0, 0.0]
    training = RewardModelInTraining(new, OptimizerConfig(learning_rate=0.1))
    finished(trainer, step(trainer, training, pairs()))
    assert np.array_equal(np.array(model(mx.array([[1, 2, 3]]))), before)


def test_the_base_models_own_head_gets_no_factors() -> None:
    trainer, _ = made()
    lora = changed(LORA, lora_target_modules=("q_proj", "lm_head"))
    assert not any("lm_head" in path for path in RewardModel.new(trainer.model.layout, lora, 0).params)


# ---- the loss and its gradients ------------------------------------------------------------------


def test_the_loss_is_that_of_bradley_and_terry() -> None:
    chosen, rejected = mx.array([2.0, -1.0, 300.0, -300.0]), mx.array([0.5, 0.0, 0.0, 0.0])
    by_hand = [math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.0)), 0.0, 300.0]
    assert preference_loss(chosen, rejected).item() == pytest.approx(sum(by_hand), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tokens", [24, 1000])
def test_gradients_equal_those_of_plain_forwards(family: str, checkpointed: bool, tokens: int) -> None:
    """Of head and adapter, whatever the micro-batches."""
    trainer, model = made(family, tokens, checkpointed)
    start, data = moved(trainer), pairs()
    recorder = Recorder(start, OptimizerConfig())
    got = finished(trainer, step(trainer, recorder, data))

    def plain(params: Any) -> mx.array:
        terms = []
        for pair in data:
            better, worse = (
                plain_reward(trainer, model, params, start.scale, row) for row in (pair.chosen, pair.rejected)
            )
            terms.append(mx.log(1 + mx.exp(worse - better)))
        return mx.stack(terms).mean()

    want, gradients = mx.value_and_grad(plain)(start.params)
    assert got.loss == pytest.approx(want.item(), abs=1e-4)
    assert_close(recorder.seen, {name: np.array(leaf) for name, leaf in tree_flatten(gradients)}, 1e-4)


# ---- steps ---------------------------------------------------------------------------------------


def test_gradients_that_are_not_finite_concern_their_caller_only() -> None:
    trainer, _ = made()
    start = moved(trainer)
    broken = replace(start, params={**start.params, HEAD: {"weight": mx.full((64,), math.nan)}})
    training = RewardModelInTraining(broken, OptimizerConfig())
    failed, rewards = step(trainer, training, pairs()), score(trainer, start, [(1, 2)])
    while trainer.waits():
        trainer.advance()
    with pytest.raises(TrainingFailedError, match="lower the learning rate"):
        failed.result(timeout=0)
    assert training.model is broken
    assert len(rewards.result(timeout=0)) == 1
