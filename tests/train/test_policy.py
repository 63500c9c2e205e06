"""Saving policies and going on from them, what is refused, and whether anything is learnt."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from configs import changed
from trainers import (
    LORA,
    SETTINGS,
    learn,
    leaves,
    logprobs,
    make_policy,
    make_trainer,
    packed,
    plain_logprobs,
    samples,
    snapshot,
    with_logprobs,
)

from mlx_parallm.config import LearningRateSchedule, OptimizerConfig
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.train.data import answered
from mlx_parallm.train.policy import Policy, PolicySnapshot

# ---- saving and going on -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", list(LearningRateSchedule))
def test_a_restored_policy_makes_the_same_next_update_to_the_bit(tmp_path, schedule: LearningRateSchedule) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule=schedule, warmup_updates=2, decay_updates=8)
    settings = changed(SETTINGS, optimizer=optimizer)
    trainer, _ = make_trainer(settings)
    policy = make_policy(trainer)
    for seed in range(3):
        learn(trainer, policy, samples(seed=seed))
    saved = snapshot(policy)
    saved.save(tmp_path)
    learn(trainer, policy, samples(seed=9))
    again = Policy(trainer.model.layout, LORA, start=PolicySnapshot.load(tmp_path, saved.weights))
    assert again.state.step == 3
    learn(trainer, again, samples(seed=9)[::-1])
    assert all(np.array_equal(leaf, leaves(policy)[name]) for name, leaf in leaves(again).items())
    assert all(
        np.array_equal(leaf, snapshot(policy).optimizer[name]) for name, leaf in snapshot(again).optimizer.items()
    )


@pytest.mark.parametrize("schedule", list(LearningRateSchedule))
def test_updates_that_change_nothing_any_more_are_told_once(
    schedule: LearningRateSchedule, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule has brought the learning rate to 0."""
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule=schedule, warmup_updates=1, decay_updates=2)
    trainer, _ = make_trainer(changed(SETTINGS, optimizer=optimizer))
    policy, told = make_policy(trainer), []
    for seed in range(5):
        before = leaves(policy)
        learn(trainer, policy, samples(seed=seed))
        told.append(len(caplog.records))
        moved = any(not np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
        assert moved is (schedule is LearningRateSchedule.CONSTANT or seed < 3)
    if schedule is LearningRateSchedule.CONSTANT:
        assert told == [0] * 5
    else:
        assert told == [0, 0, 0, 1, 1]
        assert f"{schedule.value} learning rate is 0 after 3 updates" in caplog.text
        assert "raise rl_training.optimizer.decay_updates" in caplog.text


def test_a_policy_of_another_rank_is_refused() -> None:
    trainer, _ = make_trainer()
    saved = snapshot(make_policy(trainer))
    with pytest.raises(InvalidRequestError, match=r"rank is 4.*trains rank 2"):
        Policy(trainer.model.layout, changed(LORA, lora_rank=2, lora_alpha=4.0), start=saved)


def test_a_rank_stabilised_policy_is_served_as_it_is_trained_and_goes_on_from_its_checkpoint() -> None:
    """The bank's forward pass gives the logprobs of the trainer, whose scale is alpha / √rank."""
    lora = changed(LORA, lora_rslora=True)
    trainer, model = make_trainer(lora=lora)
    policy = make_policy(trainer, moved=0.05)
    assert policy.scale == 8.0 / 4**0.5
    saved = snapshot(policy)
    assert (saved.weights.rslora, saved.weights.alpha) == (True, 8.0)
    bank = trainer.model.bank
    for _ in bank.write(1, saved.weights):
        pass
    for sample in samples(4):
        batch = packed([sample])
        with bank.forward([1], [len(sample.token_ids)]):
            logits = model(mx.array([sample.token_ids]))[0]
        served = (logits - mx.logsumexp(logits, -1, keepdims=True))[mx.array(sample.trained()) - 1, batch.targets]
        trained = logprobs(trainer, batch, policy.params, policy.scale)
        assert trained.tolist() == pytest.approx(served.tolist(), abs=1e-4)
    again = Policy(trainer.model.layout, lora, start=saved)
    assert all(np.array_equal(leaf, leaves(policy)[name]) for name, leaf in leaves(again).items())
    with pytest.raises(InvalidRequestError, match=r"alpha 8 \(rsLoRA\).*alpha 8 and"):
        Policy(trainer.model.layout, LORA, start=saved)


def test_a_target_that_the_model_lacks_is_refused() -> None:
    trainer, _ = make_trainer()
    with pytest.raises(ConfigError, match="nothing_proj"):
        Policy(trainer.model.layout, changed(LORA, lora_target_modules=("nothing_proj",)))


def test_a_bandit_is_learnt_and_with_shuffled_rewards_it_is_not() -> None:
    """One prompt, one token to draw; token 7 pays. It comes to be drawn; with rewards dealt at random it does not."""
    assert _probability_after(shuffled=False) > 0.9
    assert _probability_after(shuffled=True) < 0.2


def _probability_after(shuffled: bool) -> float:
    trainer, model = make_trainer(changed(SETTINGS, optimizer=OptimizerConfig(learning_rate=3e-2)))
    policy, random = make_policy(trainer), np.random.default_rng(0)
    prompt = (1, 2, 3)
    for _ in range(30):
        # half of each group are drawn uniformly, so that the paying token is found at all
        tokens = [7, 7, *(int(t) for t in random.integers(0, 250, 6))]
        rewards = np.array([float(token == 7) for token in tokens])
        if shuffled:
            random.shuffle(rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        drawn = [answered(prompt, (t,), advantage=float(a)) for t, a in zip(tokens, advantages, strict=True)]
        learn(trainer, policy, with_logprobs(trainer, model, policy, drawn))
    return float(np.exp(plain_logprobs(trainer, model, policy.params, answered(prompt, (7,)))[0]))
