"""The trainer of the tiny model is made to diverge on purpose, and left alone for a hundred updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import TRAINING, changed
from rl.test_divergence import watch
from trainers import everywhere, make_policy, make_trainer

from mlx_parallm.config import DivergenceConfig
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome, answered

pytestmark = pytest.mark.ci

PROMPT = (5, 6, 7)
GROUP, LENGTH = 16, 6
TEMPERATURE = 0.25
"""The tiny model's logits are so close to each other that at 1 it cannot become certain of anything."""
USUAL = changed(TRAINING, learning_rate=2e-3, max_kl_step=None, micro_batch_tokens=1000, gradient_checkpointing=False)
WILD = changed(USUAL, learning_rate=1.0)


class Run:
    """Updates of one policy. Its answers are rewarded for small token ids, and the rules judge each update."""

    def __init__(self, limits: DivergenceConfig | None = None) -> None:
        self.trainer, self.model = make_trainer(USUAL)
        self.policy = make_policy(self.trainer)
        self.rules = watch(limits)
        self.random = np.random.default_rng(0)

    def draw(self, length: int = LENGTH) -> tuple[list[Datum], dict[str, float]]:
        """A group that the policy draws, and the metrics of its rewards."""
        tokens, logprobs = self._drawn(length)
        rewards = 1.0 - tokens.mean(-1) / 250
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        group = [
            answered(PROMPT, tuple(row.tolist()), tuple(logp.tolist()), TEMPERATURE, float(advantage), 0)
            for row, logp, advantage in zip(tokens, logprobs, advantages, strict=True)
        ]
        return group, {"reward_mean": float(rewards.mean()), "completion_tokens": float(length)}

    def update(self, group: Sequence[Datum], metrics: dict[str, float]) -> list[str]:
        """One update; the signals that diverge in it. It is kept if none holds it."""
        before = self.policy.state
        future = self.trainer.begin(self.policy, UpdateBatch(tuple(group), metrics))
        while self.trainer.waits():
            self.trainer.advance()
        outcome: UpdateOutcome = future.result(timeout=0)
        found = self.rules.judge(outcome.metrics, True, outcome.skipped)
        self.rules.observe(outcome.metrics)
        if any(each.action != "tell" for each in found):
            self.policy.restore(before)
        elif not outcome.skipped:
            self.rules.accept(outcome.metrics)
        return [each.signal for each in found]

    def _drawn(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.tile(np.array(PROMPT), (GROUP, 1))
        logprobs = []
        for _ in range(length):
            logits = np.array(self._logits(rows))
            logp = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
            tokens = (logp + self.random.gumbel(size=logp.shape)).argmax(-1)
            logprobs.append(logp[np.arange(GROUP), tokens])
            rows = np.concatenate([rows, tokens[:, None]], -1)
        return rows[:, len(PROMPT) :], np.stack(logprobs, -1)

    def _logits(self, rows: np.ndarray) -> mx.array:
        with self.trainer.model.bank.using(everywhere(self.policy.params, self.policy.state.scale)):
            return self.model(mx.array(rows))[:, -1].astype(mx.float32) / TEMPERATURE


def without(*signals: str) -> DivergenceConfig:
    """The default limits, but for these signals."""
    return DivergenceConfig.model_validate({signal: {"limit": None} for signal in signals})


def trained(run: Run, updates: int = 4) -> Run:
    """After some healthy updates."""
    for _ in range(updates):
        assert run.update(*run.draw()) == []
    return run


def wild(run: Run) -> None:
    """From now on, with a learning rate that is far too large."""
    run.trainer.config = WILD


@pytest.mark.timeout(120)
def test_a_hundred_healthy_updates_raise_nothing_and_learn() -> None:
    run = Run()
    first = run.draw()[1]["reward_mean"]
    trained(run, 100)
    assert run.draw()[1]["reward_mean"] > first + 0.2


def test_a_step_that_is_too_large_is_noticed_before_it_goes_live() -> None:
    run = trained(Run())
    wild(run)
    before = run.policy.state
    assert run.update(*run.draw()) == ["kl_step"]
    assert run.policy.state is before


def test_samples_that_the_policy_has_left_behind_are_noticed_in_their_update() -> None:
    run = trained(Run(without("kl_step", "kl")))
    old = run.draw()
    wild(run)
    run.update(*run.draw())
    assert "ratio" in run.update(*old)


def test_a_policy_that_is_certain_of_worse_answers_is_noticed_at_the_next_update() -> None:
    run = trained(Run(without("kl_step", "kl", "ratio")))
    run.draw()
    wild(run)
    assert run.update(*run.draw()) == []
    group, metrics = run.draw()
    assert run.update(group, metrics | {"reward_mean": 0.1}) == ["entropy"]


def test_answers_that_do_not_end_any_more_are_noticed_in_the_same_update() -> None:
    run = trained(Run())
    group, metrics = run.draw(4 * LENGTH)
    assert run.update(group, {**metrics, "reward_mean": 0.0}) == ["length"]


def test_a_policy_far_from_the_base_model_is_noticed_in_two_updates() -> None:
    run = trained(Run(without("kl_step", "ratio", "entropy")))
    wild(run)
    group, metrics = run.draw()
    assert run.update([_opposite(sample) for sample in group], metrics) == []
    assert [run.update(*run.draw()) for _ in range(2)] == [[], ["kl"]]


def _opposite(sample: Datum) -> Datum:
    return replace(sample, advantages=tuple(-value for value in sample.advantages))


def test_an_overflow_is_noticed_and_changes_nothing() -> None:
    run = trained(Run())
    group, metrics = run.draw()
    before = run.policy.state
    group = [answered(PROMPT, (9, 9), (-5.0, -5.0), 1.0, 3e38, 0), answered(PROMPT, (9, 9), (-5.0, -5.0), 1.0, 3e38, 0)]
    assert run.update(group, metrics) == ["not_finite"]
    assert run.policy.state is before
