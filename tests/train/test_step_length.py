"""An update moves the policy by at most `max_kl_step`, from the first one on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from configs import changed
from trainers import SETTINGS, finish, learn, leaves, make_policy, make_trainer, samples

from mlx_parallm.config import Algorithm

TARGET = 0.05
WILD = changed(SETTINGS, learning_rate=0.5, max_kl_step=TARGET)
UNBOUND = changed(WILD, max_kl_step=None)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_first_update_moves_the_policy_by_at_most_the_target(minibatches: int) -> None:
    steps = {}
    for settings in (UNBOUND, WILD):
        trainer, _ = make_trainer(changed(settings, minibatches=minibatches))
        policy = make_policy(trainer)
        start = leaves(policy)
        metrics = learn(trainer, policy, samples(16, groups=4)).metrics
        steps[settings is WILD] = metrics
        way = max(np.abs(value - start[name]).max() for name, value in leaves(policy).items())
        assert (way < 0.4) == (settings is WILD), "AdamW's first step is the learning rate in every number"
    assert steps[False]["kl_step"] > 10 * TARGET, "otherwise this test shows nothing"
    assert steps[True]["kl_step"] <= TARGET
    assert steps[True]["kl_step"] > TARGET / 100, "it is not stopped altogether"


def test_a_step_beyond_all_numbers_is_moved_back_too() -> None:
    trainer, _ = make_trainer(changed(WILD, learning_rate=1e4))
    outcome = learn(trainer, make_policy(trainer, moved=0.05), samples(16, groups=4))
    assert outcome.skipped == ""
    assert outcome.metrics["kl_step"] <= TARGET


def test_the_step_is_a_part_of_the_way_and_its_metric_says_which() -> None:
    ends = []
    for settings in (UNBOUND, WILD):
        trainer, _ = make_trainer(settings)
        policy = make_policy(trainer, moved=0.05)
        start, outcome = leaves(policy), learn(trainer, policy, samples(16, groups=4))
        ends.append({name: value - start[name] for name, value in leaves(policy).items()})
    whole, part = ends
    for name, way in part.items():
        np.testing.assert_allclose(way, outcome.metrics["step_scale"] * whole[name], atol=1e-5)


def test_a_step_that_a_client_asks_for_is_not_moved_back() -> None:
    """Tinker's optim_step is AdamW's step, whatever it does to the policy."""
    ends = []
    for settings in (UNBOUND, WILD):
        trainer, _ = make_trainer(settings)
        policy = make_policy(trainer)
        trainer.accumulate(policy, samples(), settings.loss)
        step = trainer.step(policy, settings.optimizer)
        finish(trainer)
        assert step.result(timeout=0).metrics["step_scale"] == 1.0
        ends.append(leaves(policy))
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])


def test_losses_of_samples_that_the_policy_need_not_have_sampled_are_not_measured() -> None:
    trainer, _ = make_trainer(changed(WILD, loss=changed(WILD.loss, algorithm=Algorithm.CROSS_ENTROPY)))
    metrics = learn(trainer, make_policy(trainer), samples()).metrics
    assert ("kl_step" in metrics, metrics["step_scale"]) == (False, 1.0)


def test_an_update_without_any_gradient_is_skipped_and_leaves_the_policy() -> None:
    trainer, _ = make_trainer(WILD)
    policy = make_policy(trainer, moved=0.05)
    learn(trainer, policy, samples())
    before = leaves(policy)
    equal = [replace(sample, advantages=(0.0,) * len(sample.token_ids)) for sample in samples()]
    outcome = learn(trainer, policy, equal)
    assert (outcome.skipped, outcome.step) == ("no_gradient", 1)
    after = leaves(policy)
    assert all((before[name] == after[name]).all() for name in before), "nor does it continue as before"
