"""What training holds of the device's memory: gradients added in place, and the trainer's own count of it all."""

from __future__ import annotations

import gc
import math
from concurrent.futures import Future

import mlx.core as mx
import numpy as np
import pytest
from configs import changed
from mlx.utils import tree_flatten
from trainers import LORA, SETTINGS, finish, learn, make_policy, make_trainer, samples

from mlx_parallm.config import ModelConfig, ResolvedTraining
from mlx_parallm.errors import StepFailedError
from mlx_parallm.train.accumulation import Accumulation
from mlx_parallm.train.data import UpdateBatch, UpdateOutcome
from mlx_parallm.train.model import Recomputes
from mlx_parallm.train.pacing import Pacer
from mlx_parallm.train.trainer import GRPOTrainer

pytestmark = pytest.mark.ci

WIDE = changed(LORA, lora_rank=64, lora_target_modules=ModelConfig().lora_target_modules)
LARGE = changed(SETTINGS, micro_batch_tokens=1, gradient_checkpointing=True)
"""Gradients of 4 MB, beside which the activations of a micro-step of one short sample are little."""
SMALL_STEP = {"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 256, "head_dim": 32}
SET = 4 * 8 * 64 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
"""Bytes of one set of gradients."""


def large(settings: ResolvedTraining = LARGE, lora: ModelConfig = WIDE) -> GRPOTrainer:
    return make_trainer(settings, lora=lora, **SMALL_STEP)[0]


def active() -> int:
    gc.collect()
    return mx.get_active_memory()


@pytest.mark.parametrize("policies", [1, 2])
def test_a_micro_step_adds_its_gradients_in_place(policies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first makes one set of them; during the next no second one is there, whole."""
    monkeypatch.setattr(Pacer, "has_room", False)  # one micro-step in each unit
    trainer = large()
    trainer.pace(math.inf)  # each micro-step in one unit, however slow the machine
    take = Accumulation.take
    monkeypatch.setattr(Accumulation, "take", lambda work, _: take(work, math.inf))  # all policies in every micro-step
    futures: list[Future[UpdateOutcome]] = []
    for at in range(policies):
        policy = make_policy(trainer, moved=0.01, name=str(at))
        assert 4 * policy.parameters == SET
        futures.append(trainer.begin(policy, UpdateBatch(tuple(samples(4, groups=1)))))
    mx.eval([policy.params for policy in trainer.policies.values()])
    before = active()
    for _ in range(policies):
        trainer.advance()  # up to the micro-steps
    trainer.advance()
    first = active()
    assert first - before == pytest.approx(policies * SET, rel=0.1)
    for _ in range(2):
        trainer.advance()
        assert trainer.bytes_of_updates < 1.6 * policies * SET
        assert active() == pytest.approx(first, abs=0.1 * SET)
    assert not any(future.done() for future in futures)


def test_an_update_leaves_nothing_behind() -> None:
    trainer = large()
    policy = make_policy(trainer, moved=0.01)
    learn(trainer, policy, samples(3))
    before = active()
    for seed in range(3):
        learn(trainer, policy, samples(3, seed))
    assert active() == pytest.approx(before, abs=0.1 * SET)


# ---- its own count -------------------------------------------------------------------------------


def test_open_policies_count_with_their_optimizer_state() -> None:
    trainer = large()
    assert trainer.bytes_held == 0
    before = active()
    one = trainer.open("one")
    state = sum(leaf.nbytes for _, leaf in tree_flatten([one.params, one.state.optimizer]))
    assert trainer.bytes_held == one.nbytes == state
    assert 3 * SET <= state <= 3.01 * SET
    assert active() - before == pytest.approx(state, rel=0.05)
    trainer.open("two")
    assert trainer.bytes_held == 2 * state
    trainer.open("one")
    assert trainer.bytes_held == 2 * state, "in the place of the first"


def test_gradients_and_activations_count_while_updates_wait() -> None:
    trainer = large()
    policy = make_policy(trainer, moved=0.01)
    resting = trainer.bytes_held
    trainer.begin(policy, UpdateBatch(tuple(samples(4, groups=1))))
    assert trainer.bytes_of_updates == SET, "activations are not known yet"
    trainer.advance()
    working = trainer.bytes_of_updates - SET
    assert working > 0
    while trainer.waits():
        held = active()
        trainer.advance()
        if trainer.waits():
            counted = trainer.bytes_of_updates - SET + trainer.bytes_held - resting
            assert mx.get_peak_memory() - held <= counted + 10_000  # the losses of several micro-steps, and such
    assert (trainer.bytes_held, trainer.bytes_of_updates) == (resting, 0)
    trainer.begin(policy, UpdateBatch(tuple(samples(4, groups=1))))
    assert trainer.bytes_of_updates >= SET + working, "as last measured"


def test_activations_grow_with_the_micro_step() -> None:
    """Measured, not guessed."""

    def working(micro_batch_tokens: int) -> int:
        trainer = large(changed(LARGE, micro_batch_tokens=micro_batch_tokens), LORA)
        learn(trainer, make_policy(trainer), samples(40))
        return trainer.pacer.pass_bytes

    assert working(1000) > 3 * working(1)


def test_only_micro_steps_that_are_too_large_are_recomputed_and_gradients_are_the_same() -> None:
    def params(recomputes: Recomputes) -> list[mx.array]:
        trainer = large(changed(LARGE, micro_batch_tokens=30), LORA)
        trainer.model.recomputes = recomputes
        policy = make_policy(trainer, moved=0.05)
        learn(trainer, policy, samples(12))
        return [leaf for _, leaf in tree_flatten(policy.params)]

    asked: list[tuple[int, int]] = []
    some = params(lambda tokens, longest, _: asked.append((tokens, longest)) or tokens > 25)
    assert {tokens > 25 for tokens, _ in asked} == {True, False}
    assert all(longest <= tokens for tokens, longest in asked)
    for mine, always in zip(some, params(lambda *_: True), strict=True):
        assert mx.array_equal(mine, always)


def test_an_update_that_failed_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = large()
    policy = make_policy(trainer)
    resting = trainer.bytes_held
    future = trainer.begin(policy, UpdateBatch(tuple(samples())))
    of_micro_steps = [trainer._forwards.gradients, lambda parts: 1 / 0]  # the first succeeds, the second fails
    monkeypatch.setattr(trainer._forwards, "gradients", lambda parts: of_micro_steps.pop(0)(parts))
    with pytest.raises(ZeroDivisionError):
        finish(trainer)
    trainer.reset()
    assert isinstance(future.exception(timeout=0), StepFailedError)
    assert trainer.bytes_held == resting


def test_callbacks_of_an_update_see_the_count_without_it() -> None:
    """A callback of its future may begin the next update."""
    trainer, seen = large(), []
    policy = make_policy(trainer)
    resting = trainer.bytes_held

    def again(_: Future[UpdateOutcome]) -> None:
        seen.append(trainer.bytes_held)
        if len(seen) == 1:
            begin()

    def begin() -> None:
        trainer.begin(policy, UpdateBatch(tuple(samples()))).add_done_callback(again)

    begin()
    finish(trainer)
    assert seen == [resting, resting]
    assert trainer.bytes_held == resting


def test_the_peak_of_the_process_is_kept_though_its_counter_starts_again() -> None:
    trainer = large()
    policy = make_policy(trainer)
    burst = mx.array(np.zeros(16 * SET // 4, np.float32)) + 1.0
    mx.eval(burst)
    del burst
    peak = trainer.peak_bytes
    assert peak >= 16 * SET
    learn(trainer, policy, samples())
    assert trainer.peak_bytes == peak
    assert mx.get_peak_memory() < peak


def test_what_is_kept_to_go_back_to_is_shared_and_counts_while_it_is_held() -> None:
    """No copy is made: the arrays of then are the policy's own, until its next update."""
    trainer = large()
    policy = make_policy(trainer, moved=0.01)
    learn(trainer, policy, samples(3))
    resting, before = trainer.bytes_held, active()
    kept = policy.state
    assert policy.state is kept
    assert active() == pytest.approx(before, abs=0.01 * SET)
    assert trainer.bytes_held == resting, "it is the policy as it is"
    learn(trainer, policy, samples(3, 1))
    assert trainer.bytes_held == resting + policy.nbytes
    assert active() - before == pytest.approx(policy.nbytes, rel=0.1)
    policy.restore(kept)
    assert trainer.bytes_held == resting
    del kept
    assert active() == pytest.approx(before, abs=0.1 * SET)


def test_updates_that_are_given_up_leave_the_policy_as_it_was() -> None:
    trainer = large()
    policy, futures = make_policy(trainer, moved=0.01), []
    before = policy.params
    for _ in range(2):
        futures.append(trainer.begin(policy, UpdateBatch(tuple(samples(4, groups=1)))))
    trainer.advance()
    trainer.abandon(policy)
    assert [type(each.exception(timeout=0)) for each in futures] == [StepFailedError] * 2
    assert not trainer.waits()
    assert policy.params is before
    assert trainer.bytes_held == policy.nbytes
