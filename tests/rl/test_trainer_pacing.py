"""Micro-steps in units: how they fall changes nothing of what is learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trainers import SETTINGS, leaves, make_policy, make_trainer, samples, snapshot

from mlx_parallm.errors import AdapterFileError, StepFailedError
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import TrainerSettings
from mlx_parallm.rl.snapshot import PolicySnapshot

WHOLE, ONE_STAGE = 1e9, 1e-9


def trained(settings: TrainerSettings, seconds: float, updates: int = 2) -> tuple[Policy, int, list[object]]:
    """A policy after some updates, the units that they took, and what was told of them."""
    trainer, _ = make_trainer(settings)
    trainer.pace(seconds)
    policy, told, units = make_policy(trainer, moved=0.05), [], 0
    for seed in range(updates):
        trainer.begin(policy, UpdateBatch(tuple(samples(12, seed=seed))), told.append)
        while trainer.waits():
            trainer.advance()
            units += 1
    return policy, units, told


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_an_update_is_the_same_to_the_bit_however_its_units_fall(checkpointed: bool, kl_coef: float) -> None:
    loss = replace(SETTINGS.loss, kl_coef=kl_coef)
    settings = replace(SETTINGS, checkpoint_layers=checkpointed, loss=loss, measure_step_kl=True)
    whole, few, told = trained(settings, WHOLE)
    cut, many, told_cut = trained(settings, ONE_STAGE)
    assert many > 2 * few
    for name, leaf in leaves(whole).items():
        assert np.array_equal(leaf, leaves(cut)[name]), name
    for one, other in zip(told, told_cut, strict=True):
        assert isinstance(one, UpdateOutcome)
        assert isinstance(other, UpdateOutcome)
        for figure in one.metrics.keys() - {"seconds", "device_seconds"}:
            assert one.metrics[figure] == other.metrics[figure], figure


def test_a_unit_of_one_stage_computes_a_layer_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward through each layer, the losses, back through each layer; the step; the reference, layer by layer."""
    settings = replace(SETTINGS, micro_batch_tokens=1000)
    trainer, model = make_trainer(settings)
    trainer.pace(ONE_STAGE)
    policy, told, units = make_policy(trainer, moved=0.05), [], 0
    trainer.begin(policy, UpdateBatch(tuple(samples())), told.append)
    while trainer.waits():
        trainer.advance()
        units += 1
    layers = len(model.layers)
    assert units == (layers + 1 + layers) + 1 + (layers + 1)


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_unit_that_fails_costs_its_update_wherever_it_stood(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make_trainer(replace(SETTINGS, micro_batch_tokens=1000))
    trainer.pace(ONE_STAGE)
    policy, told = make_policy(trainer, moved=0.05), []
    before, resting = leaves(policy), trainer.bytes_held
    trainer.begin(policy, UpdateBatch(tuple(samples())), told.append)
    for _ in range(failing - 1):
        trainer.advance()
    monkeypatch.setattr("mlx_parallm.rl.pacing.mx.eval", lambda _: 1 / 0)
    monkeypatch.setattr("mlx_parallm.rl.update.Update.step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.advance()
    monkeypatch.undo()
    trainer.reset()
    assert isinstance(told[0], StepFailedError)
    assert not trainer.waits()
    assert trainer.bytes_held == resting
    assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
    trainer.begin(policy, UpdateBatch(tuple(samples())), told.append)
    while trainer.waits():
        trainer.advance()
    assert isinstance(told[1], UpdateOutcome)


@pytest.mark.parametrize("text", ["[4]", "4", '{"step": "x"}', "", "{}"])
def test_damaged_facts_of_a_checkpoint_are_refused(tmp_path, text: str) -> None:
    trainer, _ = make_trainer()
    saved = snapshot(make_policy(trainer))
    saved.save(tmp_path)
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(AdapterFileError, match="no usable state of a trainer"):
        PolicySnapshot.load(tmp_path, saved.weights)
