"""Policies that learn at the same time: as if one after the other, in fewer passes over the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from configs import changed, loss_config
from trainers import (
    SETTINGS,
    Recorder,
    assert_close,
    failing,
    fall,
    finish,
    gradients,
    learn,
    leaves,
    lora_of,
    make_policy,
    make_trainer,
    samples,
    snapshot,
    unclipped,
    with_logprobs,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.errors import StepFailedError, TrainingFailedError
from mlx_parallm.train import jobs as training_jobs
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

ROOM = changed(SETTINGS, micro_batch_tokens=200)
"""Two small updates in one micro-step."""


@dataclass
class Outcomes:
    """The outcomes of updates, in the order in which they ended."""

    ended: list[tuple[str, UpdateOutcome | Exception]] = field(default_factory=list)

    def begin(self, trainer: GRPOTrainer, policy: Policy | Recorder, drawn: Sequence[Datum], name: str) -> None:
        future = trainer.begin(policy, UpdateBatch(tuple(drawn)))
        future.add_done_callback(lambda done: self.ended.append((name, done.exception() or done.result())))

    def of(self, name: str) -> UpdateOutcome | Exception:
        (outcome,) = [outcome for ended, outcome in self.ended if ended == name]
        return outcome


def trio(trainer: GRPOTrainer, model: nn.Module) -> list[tuple[str, Policy, list[Datum]]]:
    """Three policies unlike each other; two of them learn from the same prompts and completions."""
    policies = [make_policy(trainer, 0.05, name, seed) for seed, name in enumerate(("one", "two", "three"))]
    drawn = [samples(6, 1), samples(6, 1), samples(11, 2, groups=3)]
    pairs = zip(policies, drawn, strict=True)
    return [(f"{at}", policy, with_logprobs(trainer, model, policy, each)) for at, (policy, each) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("family", "algorithm", "kl_coef"),
    [
        ("llama", Algorithm.DAPO, 0.1),
        ("qwen3_moe", Algorithm.GRPO, 0.1),
        ("mamba2", Algorithm.GRPO, 0.1),
        ("gemma3_text", Algorithm.CROSS_ENTROPY, 0.0),  # ratios and k3 take up the rounding of its large logits
    ],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_and_figures_are_those_of_one_after_the_other(
    family: str, algorithm: Algorithm, kl_coef: float, checkpointed: bool
) -> None:
    settings = unclipped(
        ROOM, gradient_checkpointing=checkpointed, loss=loss_config(algorithm=algorithm, kl_coef=kl_coef)
    )
    trainer, model = make_trainer(settings, family, lora_of(family))
    jobs = trio(trainer, model)
    want = [gradients(trainer, policy, drawn) for _, policy, drawn in jobs]
    figures = [learn(trainer, Recorder(policy), drawn).metrics for _, policy, drawn in jobs]

    outcomes, recorders = Outcomes(), [Recorder(policy) for _, policy, _ in jobs]
    for recorder, (name, _, drawn) in zip(recorders, jobs, strict=True):
        outcomes.begin(trainer, recorder, drawn, name)
    finish(trainer)
    for recorder, alone, metrics, (name, _, _) in zip(recorders, want, figures, jobs, strict=True):
        assert_close(recorder.seen, alone, 1e-5)
        outcome = outcomes.of(name)
        assert isinstance(outcome, UpdateOutcome)
        assert outcome.metrics.keys() == metrics.keys()
        for figure in metrics.keys() - {"seconds", "device_seconds"}:
            assert outcome.metrics[figure] == pytest.approx(metrics[figure], rel=1e-4, abs=1e-6), figure


# ---- faults --------------------------------------------------------------------------------------


def test_a_failed_micro_step_costs_the_updates_that_were_in_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model = make_trainer(ROOM)
    jobs, outcomes = trio(trainer, model), Outcomes()
    before = [leaves(policy) for _, policy, _ in jobs]
    for name, policy, drawn in [*jobs[:2], ("second", jobs[0][1], jobs[0][2])]:
        outcomes.begin(trainer, policy, drawn, name)
    outcomes.begin(trainer, jobs[2][1], samples(60, 4), "large")
    failing(trainer, monkeypatch, trainer._forwards, "gradients")
    fall(trainer)
    assert sorted(name for name, _ in outcomes.ended) == ["0", "1"]
    assert all(isinstance(outcome, StepFailedError) for _, outcome in outcomes.ended)
    for kept, (_, policy, _) in zip(before, jobs, strict=True):
        assert all(np.array_equal(leaf, kept[name]) for name, leaf in leaves(policy).items())
    assert trainer.waits()
    finish(trainer)
    assert isinstance(outcomes.of("second"), UpdateOutcome)
    assert isinstance(outcomes.of("large"), UpdateOutcome)
    assert tuple(policy.state.step for _, policy, _ in jobs) == (1, 0, 1)


@pytest.mark.parametrize("place", ["base", "step", "measurement", "outcome"])
def test_a_fault_after_the_micro_steps_leaves_the_policy_as_it_was(monkeypatch, place: str) -> None:
    trainer, _ = make_trainer(ROOM)
    policy, outcomes = make_policy(trainer, moved=0.05), Outcomes()
    learn(trainer, policy, samples(seed=3))
    before, state = leaves(policy), snapshot(policy)
    outcomes.begin(trainer, policy, samples(), "update")
    if place == "step":
        failing(trainer, monkeypatch, mx, "isfinite")
    elif place == "outcome":
        failing(trainer, monkeypatch, training_jobs, "metrics")
    elif place == "base":
        failing(trainer, monkeypatch, training_jobs, "k3")
    else:
        failing(trainer, monkeypatch, trainer._jobs, "_mean_kl")
    fall(trainer)
    assert isinstance(outcomes.of("update"), StepFailedError)
    assert not trainer.waits()
    assert policy.state.step == state.step
    assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
    after = snapshot(policy).optimizer
    assert all(np.array_equal(leaf, state.optimizer[name]) for name, leaf in after.items())
    assert isinstance(learn(trainer, policy, samples()), UpdateOutcome)


def test_a_shared_micro_step_ends_when_the_last_of_its_updates_is_given_up() -> None:
    """One after the other, as when two clients close their models: the next update does not wait for it."""
    trainer, model = make_trainer(changed(SETTINGS, micro_batch_tokens=2000))
    trainer.pace(1e-9)  # one stage in each unit

    def units(seed: int) -> int:
        """What one update takes."""
        policy, count = make_policy(trainer, 0.05, "alone", seed), 0
        trainer.begin(policy, UpdateBatch(tuple(samples(6))))
        while trainer.waits():
            trainer.advance()
            count += 1
        return count

    alone = units(1)
    futures = [trainer.begin(policy, UpdateBatch(tuple(drawn))) for _, policy, drawn in trio(trainer, model)[:2]]
    for _ in range(4):
        trainer.advance()
    assert trainer._running is not None
    assert len(trainer._running.tokens) == 2, "it is shared, and not at its end"
    for name in ("one", "two"):
        trainer.close(name)
    assert all(isinstance(future.exception(timeout=0), StepFailedError) for future in futures)
    assert units(2) == alone


# ---- what belongs to no policy ---------------------------------------------------------------------


def test_micro_steps_come_between_the_parts_of_other_work() -> None:
    trainer, _ = make_trainer(changed(SETTINGS, micro_batch_tokens=16))
    policy = make_policy(trainer)
    trainer.pace(1e-6)  # one stage in each unit
    update, parts = trainer.begin(policy, UpdateBatch(tuple(samples(8)))), []

    def other():
        for _ in range(200):
            parts.append(update.done())
            yield None
        return len(parts)

    asked = trainer.run(other())
    finish(trainer)
    assert asked.result(timeout=0) == 200
    assert update.result(timeout=0).step == 1
    assert parts[0] is False, "it does not wait for the whole update"
    assert parts[-1] is True, "nor the update for all of it"


def test_other_work_that_cannot_go_on_says_so_and_costs_nobody_else() -> None:
    trainer, _ = make_trainer(SETTINGS)

    def other():
        yield None
        raise TrainingFailedError("not finite")

    failed, scored = trainer.run(other()), trainer.logprobs(None, samples(2))
    finish(trainer)
    with pytest.raises(TrainingFailedError, match="not finite"):
        failed.result(timeout=0)
    assert len(scored.result(timeout=0)) == 2
