"""Gradients that are accumulated over several calls, and the steps that use them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from configs import changed, limited, loss_config
from trainers import (
    LORA,
    SETTINGS,
    SINGLE,
    Recorder,
    assert_close,
    finish,
    gradients,
    learning,
    make_policy,
    make_trainer,
    samples,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.errors import StepFailedError
from mlx_parallm.train.data import Datum, UpdateBatch
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.policy import Policy

LOSS, OPTIMIZER, UNCLIPPED = SETTINGS.loss, SETTINGS.optimizer, unclipped().optimizer


def parts_of(drawn: Sequence[Datum], count: int) -> list[Sequence[Datum]]:
    return [part for part in (drawn[at::count] for at in range(count)) if part]


@pytest.mark.parametrize("algorithm", SINGLE)
@pytest.mark.parametrize("calls", [1, 2, 7])
def test_one_step_of_several_calls_is_the_step_of_one_call(algorithm: Algorithm, calls: int) -> None:
    settings = unclipped(loss=loss_config(algorithm=algorithm, clip_low=0.9, clip_high=9.0))
    trainer, _, policy, drawn = learning(samples(7, groups=3), settings)
    want, recorder = gradients(trainer, policy, drawn), Recorder(policy)
    for part in parts_of(drawn, calls):
        trainer.accumulate(recorder, part, settings.loss, UpdateTotals.of(drawn))
    finish(trainer, trainer.step(recorder, settings.optimizer))
    assert_close(recorder.seen, want, 1e-5)


def test_calls_may_have_losses_of_their_own_and_are_divided_by_their_own_totals() -> None:
    trainer, _, policy, drawn = learning(samples(6), unclipped())
    calls = ((LOSS, drawn[:3]), (loss_config(Algorithm.CROSS_ENTROPY), drawn[3:]))
    alone = []
    for loss, part in calls:
        recorder = Recorder(policy)
        trainer.accumulate(recorder, part, loss)
        finish(trainer, trainer.step(recorder, UNCLIPPED))
        alone.append(recorder.seen)
    both = Recorder(policy)
    for loss, part in calls:
        trainer.accumulate(both, part, loss)
    (outcome,) = finish(trainer, trainer.step(both, UNCLIPPED))
    assert_close(both.seen, {name: leaf + alone[1][name] for name, leaf in alone[0].items()}, 1e-5)
    assert outcome.metrics["tokens"] == sum(len(sample.trained()) for sample in drawn)


def test_a_step_without_gradients_is_refused() -> None:
    trainer, _ = make_trainer()
    policy = make_policy(trainer)
    for _ in range(2):
        with pytest.raises(ValueError, match="accumulated no gradients"):
            trainer.step(policy, OPTIMIZER)
        trainer.accumulate(policy, samples(), LOSS)
        finish(trainer, trainer.step(policy, OPTIMIZER))
    trainer.accumulate(policy, samples(), LOSS)
    trainer.step(policy, OPTIMIZER)
    with pytest.raises(ValueError, match="accumulated no gradients"):
        trainer.step(policy, OPTIMIZER)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_update_that_is_under_way_never_replaces_weights_that_were_loaded_meanwhile(minibatches: int) -> None:
    """Wherever it is: its step may be made already, and only be measured."""
    settings = changed(limited(SETTINGS, kl_step=9.0), minibatches=minibatches, micro_batch_tokens=16)
    units = 0
    while True:
        trainer, _ = make_trainer(settings)
        policy = make_policy(trainer, moved=0.05)
        trainer.pace(0.0)
        future = trainer.begin(policy, UpdateBatch(samples(8, groups=2)))
        for _ in range(units):
            trainer.advance()
        if not trainer.waits():
            break
        trainer.restore("default", None)
        loaded = policy.state
        with pytest.raises(StepFailedError):
            finish(trainer, future)
        assert policy.state is loaded
        units += 1
    assert units > 3


def test_policies_have_lora_settings_of_their_own() -> None:
    trainer, _ = make_trainer()
    small = changed(LORA, lora_rank=2, lora_alpha=2.0, lora_target_modules=("q_proj",))
    one, other = trainer.open("one"), trainer.open("other", lora=small)
    assert (other.scale, one.scale) == (1.0, 2.0)
    assert {pair["a"].shape[1] for pair in other.params.values()} == {2}
    assert {path.split(".")[-1] for path in other.params} == {"q_proj"}
    futures = [trainer.accumulate(policy, samples(), LOSS) for policy in (one, other)]
    finish(trainer, *futures, trainer.step(one, OPTIMIZER), trainer.step(other, OPTIMIZER))
    assert [policy.state.step for policy in (one, other)] == [1, 1]
    assert isinstance(other, Policy)
