"""Micro-steps in units: how they fall changes nothing of what is learnt."""

from __future__ import annotations

import time

import numpy as np
import pytest
from configs import changed, limited
from trainers import SETTINGS, finish, leaves, make_policy, make_trainer, samples, snapshot

from mlx_parallm.config import ResolvedTraining
from mlx_parallm.errors import AdapterFileError, StepFailedError
from mlx_parallm.train.data import UpdateBatch, UpdateOutcome
from mlx_parallm.train.policy import Policy, PolicySnapshot

WHOLE, ONE_STAGE = 1e9, 1e-9


def trained(settings: ResolvedTraining, seconds: float, updates: int = 2) -> tuple[Policy, int, list[UpdateOutcome]]:
    """A policy after some updates, the units that they took, and their outcomes."""
    trainer, _ = make_trainer(settings)
    trainer.pace(seconds)
    policy, futures, units = make_policy(trainer, moved=0.05), [], 0
    for seed in range(updates):
        futures.append(trainer.begin(policy, UpdateBatch(tuple(samples(12, seed=seed)))))
        while trainer.waits():
            trainer.advance()
            units += 1
    return policy, units, [future.result(timeout=0) for future in futures]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("kl_coef", "max_kl_step"), [(0.0, None), (0.1, None), (0.1, 1e-4)])
def test_an_update_is_the_same_to_the_bit_however_its_units_fall(
    checkpointed: bool, kl_coef: float, max_kl_step: float | None
) -> None:
    settings = changed(SETTINGS, gradient_checkpointing=checkpointed, kl_coef=kl_coef, max_kl_step=max_kl_step)
    whole, few, outcomes = trained(settings, WHOLE)
    cut, many, cut_outcomes = trained(settings, ONE_STAGE)
    assert many > 2 * few
    assert (outcomes[0].metrics["step_scale"] < 1.0) is (max_kl_step is not None)
    for name, leaf in leaves(whole).items():
        assert np.array_equal(leaf, leaves(cut)[name]), name
    for one, other in zip(outcomes, cut_outcomes, strict=True):
        for figure in one.metrics.keys() - {"seconds", "device_seconds"}:
            assert one.metrics[figure] == other.metrics[figure], figure


def test_the_head_is_computed_in_blocks_of_positions_and_each_may_be_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the longest unit does not grow with the trained tokens of a micro-step; and nothing else changes."""
    monkeypatch.setattr("mlx_parallm.train.forwards.HEAD_BLOCK", 5)
    settings = changed(limited(SETTINGS, kl_step=None), micro_batch_tokens=1000, kl_coef=0.1)
    whole, units, _ = trained(settings, WHOLE, updates=1)
    cut, many, _ = trained(settings, ONE_STAGE, updates=1)
    assert all(np.array_equal(leaf, leaves(cut)[name]) for name, leaf in leaves(whole).items())
    positions = sum(len(sample.trained()) for sample in samples(12))
    blocks, layers = -(-positions // 5), 2
    assert units == 1
    assert many == (layers + blocks) + (layers + blocks + blocks + layers) + len(whole.params) + 1


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_unit_that_fails_costs_its_update_wherever_it_stood(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make_trainer(changed(SETTINGS, micro_batch_tokens=1000))
    trainer.pace(ONE_STAGE)
    policy, futures = make_policy(trainer, moved=0.05), []
    before, resting = leaves(policy), trainer.bytes_held
    futures.append(trainer.begin(policy, UpdateBatch(tuple(samples()))))
    for _ in range(failing - 1):
        trainer.advance()
    monkeypatch.setattr("mlx_parallm.train.pacing.mx.eval", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.advance()
    monkeypatch.undo()
    trainer.reset()
    assert isinstance(futures[0].exception(timeout=0), StepFailedError)
    assert not trainer.waits()
    assert trainer.bytes_held == resting
    assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
    futures.append(trainer.begin(policy, UpdateBatch(tuple(samples()))))
    finish(trainer)
    assert isinstance(futures[1].result(timeout=0), UpdateOutcome)


@pytest.mark.parametrize("text", ["[4]", "4", '{"step": "x"}', "", "{}"])
def test_damaged_facts_of_a_checkpoint_are_refused(tmp_path, text: str) -> None:
    trainer, _ = make_trainer()
    saved = snapshot(make_policy(trainer))
    saved.save(tmp_path)
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(AdapterFileError, match="no usable state of a trainer"):
        PolicySnapshot.load(tmp_path, saved.weights)


def test_a_damaged_state_of_the_optimizer_is_refused(tmp_path) -> None:
    trainer, _ = make_trainer()
    saved = snapshot(make_policy(trainer))
    saved.save(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterFileError, match="no usable state of a trainer"):
        PolicySnapshot.load(tmp_path, saved.weights)


def test_a_disk_that_fails_is_told_as_one(tmp_path) -> None:
    """The writer of safetensors would raise an error of its own, which no caller takes for the disk's."""
    trainer, _ = make_trainer()
    saved = snapshot(make_policy(trainer))
    (tmp_path / "optimizer.safetensors").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        saved.save(tmp_path)


def test_the_time_of_the_device_that_updates_are_charged_is_no_more_than_has_passed() -> None:
    started = time.monotonic()
    _, _, outcomes = trained(SETTINGS, ONE_STAGE)
    charged = sum(outcome.metrics["device_seconds"] for outcome in outcomes)
    assert 0 < charged <= time.monotonic() - started
