"""Reference logprobs that samples bring: they take the place of those of the base model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from configs import changed, loss_config
from sample_parts import with_advantage
from trainers import assert_close, finish, gradients, make_policy, make_trainer, plain_logprobs, samples, unclipped

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.train.data import Datum
from mlx_parallm.train.trainer import GRPOTrainer

READING = (loss_config(Algorithm.DPO), loss_config(Algorithm.GRPO, kl_coef=0.3))


def drawn() -> list[Datum]:
    """Pairs of three prompts."""
    return [with_advantage(sample, 1.0 if at < 3 else -1.0) for at, sample in enumerate(samples(6, groups=3))]


def with_reference(sample: Datum, logprobs: Sequence[float]) -> Datum:
    """The sample with a reference's logprobs of its trained tokens, in order."""
    every = [0.0] * len(sample.token_ids)
    for at, value in zip(sample.trained(), logprobs, strict=True):
        every[at] = value
    return replace(sample, reference_logprobs=tuple(every))


def without_base(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the base model computes no reference."""
    refuse: Callable[..., None] = lambda *_: pytest.fail("the base model was asked")  # noqa: E731
    monkeypatch.setattr(trainer._forwards, "reference", refuse)


@pytest.mark.parametrize("loss", READING)
@pytest.mark.parametrize("most", [1, 1000])
def test_given_logprobs_of_the_base_model_change_nothing(
    loss: ResolvedLoss, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = make_trainer(unclipped(loss=loss, micro_batch_tokens=most), measure_kl=False)
    policy = make_policy(trainer, moved=0.05)
    want = gradients(trainer, policy, drawn())
    given = [with_reference(sample, plain_logprobs(trainer, model, None, sample)) for sample in drawn()]
    without_base(trainer, monkeypatch)
    assert_close(gradients(trainer, policy, given), want, 1e-4)


def test_references_of_one_policy_are_not_those_of_another_in_the_same_micro_step() -> None:
    """One brings its reference, and the other one's is the base model."""
    trainer, _ = make_trainer(unclipped(loss=READING[0], micro_batch_tokens=1000))
    one, other = make_policy(trainer, 0.05, "one", 1), make_policy(trainer, 0.05, "other", 2)
    given = [with_reference(sample, [-2.0] * len(sample.trained())) for sample in drawn()]
    alone = [make_figures(trainer, policy, each) for policy, each in ((one, given), (other, drawn()))]
    futures = [trainer.accumulate(one, given, READING[0]), trainer.accumulate(other, drawn(), READING[0])]
    finish(trainer)
    for future, want in zip(futures, alone, strict=True):
        assert future.result(timeout=0).metrics["loss"] == pytest.approx(want, rel=1e-5)


def make_figures(trainer: GRPOTrainer, policy, each: list[Datum]) -> float:
    """The loss of these samples, by themselves."""
    future = trainer.accumulate(policy, each, READING[0])
    finish(trainer)
    trainer.abandon(policy)
    return future.result(timeout=0).metrics["loss"]


def test_references_for_a_part_of_the_samples_are_refused() -> None:
    trainer, _ = make_trainer()
    policy, (first, *rest) = make_policy(trainer), drawn()
    some = [with_reference(first, [-1.0] * len(first.trained())), *rest]
    with pytest.raises(ValueError, match="with each of the samples, or with none"):
        trainer.accumulate(policy, some, READING[1])
    with pytest.raises(ValueError, match="leave reference_logprobs out"):
        trainer.accumulate(policy, some[:1], changed(READING[1], algorithm=Algorithm.KTO))
    assert not trainer.waits()
