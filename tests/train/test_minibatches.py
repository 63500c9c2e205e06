"""Updates of several optimizer steps: the ratios are to the policy before the first, and all are made or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from configs import changed
from trainers import (
    SETTINGS,
    assert_close,
    failing,
    fall,
    learn,
    leaves,
    make_policy,
    make_trainer,
    plain_logprobs,
    samples,
    snapshot,
    with_logprobs,
)

from mlx_parallm.config import OldLogprobs, ResolvedTraining
from mlx_parallm.errors import StepFailedError
from mlx_parallm.train.data import Datum, UpdateBatch
from mlx_parallm.train.packing import minibatches
from mlx_parallm.train.trainer import GRPOTrainer

TWO = changed(SETTINGS, minibatches=2, micro_batch_tokens=30)


def unknown(drawn: Sequence[Datum]) -> list[Datum]:
    """Without sampling logprobs: the trainer's own take their place."""
    return [replace(sample, sampling_logprobs=()) for sample in drawn]


def test_groups_stay_whole_and_every_sample_is_in_one_part() -> None:
    drawn = samples(12, groups=5)
    parts = minibatches(drawn, 3)
    assert len(parts) == 3
    assert sorted(id(sample) for part in parts for sample in part) == sorted(map(id, drawn))
    groups = [{sample.group for sample in part} for part in parts]
    assert sum(map(len, groups)) == 5
    assert minibatches(drawn[::-1], 3) == parts
    assert len(minibatches(samples(4, groups=1), 3)) == 1


@pytest.mark.parametrize("old", [OldLogprobs.SAMPLER, OldLogprobs.TRAINER])
def test_the_steps_are_those_of_updates_whose_old_logprobs_are_fixed_before_the_first(old: OldLogprobs) -> None:
    optimizer = changed(SETTINGS.optimizer, eps=1e-2)  # so that rounding does not turn the sign of a whole step
    several, _ = make_trainer(changed(TWO, old_logprobs=old, optimizer=optimizer))
    single, model = make_trainer(changed(SETTINGS, micro_batch_tokens=30, optimizer=optimizer))
    policy, again = make_policy(several, moved=0.05), make_policy(single, moved=0.05)
    drawn = unknown(samples(8, groups=4))
    known = {id(sample): with_logprobs(single, model, again, [sample])[0] for sample in drawn}
    outcome = learn(several, policy, drawn)
    steps = [learn(single, again, [known[id(sample)] for sample in part]) for part in minibatches(drawn, 2)]
    assert_close(leaves(policy), leaves(again), 1e-4)
    assert (outcome.step, outcome.skipped) == (2, "")
    assert steps[1].metrics["ratio_max"] > 1.01, "the second part sees that the policy has moved"
    assert outcome.metrics["ratio_max"] == pytest.approx(steps[1].metrics["ratio_max"], rel=1e-3)
    assert outcome.metrics["tokens"] == sum(step.metrics["tokens"] for step in steps)


def test_an_update_of_several_steps_is_the_same_to_the_bit_when_it_is_made_again() -> None:
    seen = []
    for order, pace in ((1, 1e9), (-1, 1e-9)):
        trainer, _ = make_trainer(TWO)
        trainer.pace(pace)
        policy = make_policy(trainer, moved=0.05)
        learn(trainer, policy, unknown(samples(8, groups=4))[::order])
        seen.append(leaves(policy))
    assert all(np.array_equal(leaf, seen[1][name]) for name, leaf in seen[0].items())


def unchanged(trainer: GRPOTrainer, settings: ResolvedTraining = TWO):
    """A policy, and a check that neither it nor its optimizer is other than now."""
    policy = make_policy(trainer, moved=0.05)
    before, state = leaves(policy), snapshot(policy)

    def check() -> None:
        assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
        assert all(np.array_equal(leaf, state.optimizer[name]) for name, leaf in snapshot(policy).optimizer.items())
        assert policy.state.step == state.step

    return policy, check


def test_a_failure_after_the_first_step_leaves_the_policy_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make_trainer(TWO)
    trainer.pace(1e-9)
    policy, check = unchanged(trainer)
    resting = trainer.bytes_held
    future = trainer.begin(policy, UpdateBatch(tuple(samples(8, groups=4))))
    while policy.state.step == 0:
        trainer.advance()
    with monkeypatch.context() as patched:
        failing(trainer, patched, trainer._forwards, "gradients")
        fall(trainer)
    assert isinstance(future.exception(timeout=0), StepFailedError)
    assert not trainer.waits()
    check()
    assert trainer.bytes_held == resting
    assert learn(trainer, policy, samples(8, groups=4)).step == 2


def test_a_part_that_is_not_finite_skips_the_whole_update() -> None:
    trainer, _ = make_trainer(TWO)
    policy, check = unchanged(trainer)
    drawn = samples(8, groups=4)
    last = minibatches(drawn, 2)[1][0]
    bad = [replace(s, advantages=(float("nan"),) * len(s.advantages)) if s is last else s for s in drawn]
    outcome = learn(trainer, policy, bad)
    assert outcome.skipped in ("loss_not_finite", "gradient_not_finite")
    check()


def test_the_bounded_change_is_that_of_all_steps_together() -> None:
    trainer, model = make_trainer(changed(TWO, micro_batch_tokens=1000))
    policy, drawn = make_policy(trainer, moved=0.05), samples(8, groups=4)
    before = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    metrics = learn(trainer, policy, drawn).metrics
    after = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    deltas = np.concatenate([np.subtract(now, then) for then, now in zip(before, after, strict=True)])
    assert metrics["kl_step"] == pytest.approx(float(np.mean(np.expm1(deltas) - deltas)), rel=1e-3)
