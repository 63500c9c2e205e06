"""Logprobs of a teacher, and the loss that imitates it."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from sample_parts import drawn_logprobs
from trainers import (
    SETTINGS,
    assert_close,
    everywhere,
    gradients,
    gradients_of,
    lazy_logprobs,
    learn,
    make_policy,
    make_trainer,
    plain_logprobs,
    samples,
    unclipped,
    with_logprobs,
)

from mlx_parallm.config import Algorithm, RLTrainingConfig
from mlx_parallm.rl.learn.model import Params
from mlx_parallm.rl.objectives.samples import Sample, answered

DISTILLATION = loss_config(Algorithm.DISTILLATION)


def done(trainer, future):
    while trainer.waits():
        trainer.advance()
    return future.result(timeout=0)


@pytest.mark.parametrize("most", [1, 1000])
def test_logprobs_are_those_of_the_policy_as_it_is_then_or_of_the_base_model(most: int) -> None:
    trainer, model = make_trainer(changed(SETTINGS, micro_batch_tokens=most))
    policy, drawn = make_policy(trainer, moved=0.05), samples(5, groups=2)
    before = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    first = trainer.logprobs(policy, drawn)
    trainer.accumulate(policy, drawn, SETTINGS.loss)
    trainer.step(policy, SETTINGS.optimizer)
    last, base = trainer.logprobs(policy, drawn), trainer.logprobs(None, drawn)
    done(trainer, last)
    after = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    plain = [plain_logprobs(trainer, model, None, sample) for sample in drawn]
    for future, want in ((first, before), (last, after), (base, plain)):
        for got, expected in zip(future.result(timeout=0), want, strict=True):
            assert got == pytest.approx(expected, abs=1e-4)
    assert before[0] != pytest.approx(after[0], abs=1e-3)


def taught(drawn: list[Sample], seed: int = 0) -> list[Sample]:
    """With random logprobs of a teacher."""
    random = np.random.default_rng(seed)
    return [sample.with_teacher(random.uniform(-4, -1, len(sample.trained())).tolist()) for sample in drawn]


def test_the_gradient_is_that_of_the_reverse_kl_at_the_drawn_tokens() -> None:
    """-Σ (log π_teacher - log π_old) π/π_old / ΣT of plain forwards, differentiated by MLX itself."""
    trainer, model = make_trainer(unclipped(loss=DISTILLATION))
    policy = make_policy(trainer, moved=0.05)
    drawn = taught(with_logprobs(trainer, model, policy, samples(4)))
    total = sum(len(sample.trained()) for sample in drawn)

    def plain(params: Params) -> mx.array:
        value = mx.array(0.0)
        for sample in drawn:
            logp = lazy_logprobs(trainer, model, params, sample)
            old = mx.array(drawn_logprobs(sample))
            teacher = mx.array([sample.teacher_logprobs[at] for at in sample.trained()])
            value = value - ((teacher - old) * mx.exp(logp - old)).sum() / total
        return value

    assert_close(gradients(trainer, policy, drawn), gradients_of(plain, policy), 1e-5)


def test_a_student_comes_to_draw_what_the_teacher_with_a_longer_prompt_draws() -> None:
    """The teacher is the base model with two more tokens before the prompt; the student does without them."""
    trainer, model = make_trainer(changed(unclipped(loss=DISTILLATION), learning_rate=3e-2))
    policy, random = make_policy(trainer), np.random.default_rng(0)
    prompt = (1, 2, 3)

    def distribution(params: Params | None, ids: tuple[int, ...]) -> np.ndarray:
        with trainer.model.bank.using(None if params is None else everywhere(params, policy.scale)):
            return np.array(mx.softmax(model(mx.array([ids]))[0, -1]), np.float64)

    teacher = distribution(None, (9, 8, *prompt))

    def kl() -> float:
        student = distribution(policy.params, prompt)
        return float((student * np.log(student / teacher)).sum())

    before = kl()
    for _ in range(40):
        student = distribution(policy.params, prompt)
        tokens = random.choice(student.size, 32, p=student / student.sum()).tolist()
        drawn = [answered(prompt, (token,), (float(np.log(student[token])),)) for token in tokens]
        longer = [answered((9, 8, *prompt), (token,)) for token in tokens]
        logprobs = done(trainer, trainer.logprobs(None, longer))
        learn(trainer, policy, [sample.with_teacher(each) for sample, each in zip(drawn, logprobs, strict=True)])
    assert before > 0.5
    assert kl() < 0.5 * before


def test_samples_without_a_teacher_are_refused() -> None:
    trainer, _ = make_trainer(unclipped(loss=DISTILLATION))
    policy, drawn = make_policy(trainer), taught(samples(3))
    with pytest.raises(ValueError, match="teacher_logprobs"):
        trainer.accumulate(policy, [replace(drawn[0], teacher_logprobs=()), *drawn[1:]], DISTILLATION)


def test_a_server_cannot_be_told_to_distil_what_it_collects() -> None:
    with pytest.raises(ValueError, match="needs a teacher's logprobs"):
        RLTrainingConfig(algorithm="distillation")
