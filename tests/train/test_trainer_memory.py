"""What training holds of the device's memory: gradients added in place, and the trainer's own count of it all."""

from __future__ import annotations

import gc
import math
from concurrent.futures import Future

import mlx.core as mx
import pytest
from configs import changed
from mlx.utils import tree_flatten
from trainers import LORA, SETTINGS, learn, make_policy, make_trainer, samples

from mlx_parallm.config import ModelConfig, ResolvedTraining
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


def test_gradients_and_activations_count_while_updates_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "has_room", False)  # one micro-step in each unit, however fast it is
    trainer = large()
    policy = make_policy(trainer, moved=0.01)
    resting = trainer.bytes_held
    trainer.begin(policy, UpdateBatch(tuple(samples(4, groups=1))))
    assert trainer.bytes_of_updates == SET, "activations are not known yet"
    while (working := trainer.bytes_of_updates - SET) == 0:
        trainer.advance()
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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_update_that_is_given_up_half_way_leaves_nothing_behind(checkpointed: bool) -> None:
    """Its graph, which nothing evaluates any more, holds the policy's arrays."""
    trainer = large(changed(LARGE, micro_batch_tokens=2000, gradient_checkpointing=checkpointed))
    learn(trainer, make_policy(trainer, 0.01, "one"), samples(8, groups=1))
    trainer.close("one")
    before = active()
    for _ in range(2):
        trainer.pace(1e-9)
        trainer.begin(make_policy(trainer, 0.01, "one"), UpdateBatch(tuple(samples(8, groups=1))))
        for _ in range(3):
            trainer.advance()
        trainer.close("one")
        assert active() - before < SET / 10
