"""The loss of preferences, against its formula in float64, and what an update makes of groups."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from rl.fakes import answers, trajectories
from sample_parts import advantage, answer, with_advantage
from train.loss_reference import Row, token_batch, totals_of
from trainers import assert_close, gradients, make_policy, make_trainer, samples, unclipped

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import FinishReason
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.train.data import Datum
from mlx_parallm.train.losses import loss, means

DPO = loss_config(Algorithm.DPO, preference_beta=0.3)


def pairs(count: int = 3, seed: int = 0) -> list[Row]:
    """Chosen and rejected rows of unequal lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(2 * count):
        logp, ref = (rng.uniform(-3, -0.5, 2 + at).astype(np.float32).astype(np.float64) for _ in range(2))
        rows.append(Row(logp, logp, logp, ref, np.ones(2 + at), 1.0 if at % 2 == 0 else -1.0, at // 2))
    return rows


def computed(rows: list[Row], whole: list[Row] | None = None) -> tuple[float, list[np.ndarray], dict[str, float]]:
    groups = [[float(row.group == group) for row in rows] for group in sorted({row.group for row in rows})]
    batch = replace(token_batch(rows), groups=mx.array(groups))
    totals = totals_of(whole or rows)
    value, gradient = mx.value_and_grad(lambda x: loss(replace(batch, logp=x), totals, DPO)[0])(batch.logp)
    figures = means([loss(batch, totals, DPO)[1]])
    return value.item(), [np.array(line)[: row.logp.size] for line, row in zip(gradient, rows, strict=True)], figures


def expected(rows: list[Row]) -> tuple[float, list[np.ndarray]]:
    """-log σ(β ((log π/π_ref)(chosen) - (log π/π_ref)(rejected))), the mean over pairs, and its slopes by hand."""
    total, slopes = 0.0, []
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        margin = (chosen.logp - chosen.ref).sum() - (rejected.logp - rejected.ref).sum()
        total += np.log1p(np.exp(-0.3 * margin)) / (len(rows) / 2)
        slope = -0.3 / (1 + np.exp(0.3 * margin)) / (len(rows) / 2)
        slopes += [np.full(chosen.logp.size, slope), np.full(rejected.logp.size, -slope)]
    return total, slopes


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_of_preferences_equals_its_formula(seed: int) -> None:
    rows = pairs(seed=seed)
    value, gradient, figures = computed(rows)
    want, slopes = expected(rows)
    assert value == pytest.approx(want, rel=1e-5)
    for got, slope in zip(gradient, slopes, strict=True):
        np.testing.assert_allclose(got, slope, rtol=1e-5)
    right = [(a.logp - a.ref).sum() > (b.logp - b.ref).sum() for a, b in zip(rows[::2], rows[1::2], strict=True)]
    tokens = [a.logp.size + b.logp.size for a, b in zip(rows[::2], rows[1::2], strict=True)]
    assert figures["preference_accuracy"] == pytest.approx(np.dot(right, tokens) / sum(tokens))


def drawn_pairs(count: int) -> list[Datum]:
    """Pairs of one prompt each: the first is chosen."""
    made = samples(2 * count, groups=count)
    return [with_advantage(sample, 1.0 if at < count else -1.0) for at, sample in enumerate(made)]


def test_a_pair_is_never_split_and_the_gradient_does_not_depend_on_the_micro_batches() -> None:
    settings = unclipped(loss=DPO)
    drawn = drawn_pairs(5)
    seen = []
    for most in (1, 30, 10_000):
        trainer, _ = make_trainer(changed(settings, micro_batch_tokens=most))
        seen.append(gradients(trainer, make_policy(trainer, moved=0.05), drawn))
    assert_close(seen[0], seen[2], 1e-5)
    assert_close(seen[1], seen[2], 1e-5)


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0,), (1.0, -1.0, -1.0)])
def test_a_group_that_is_no_pair_is_refused(signs: tuple[float, ...]) -> None:
    trainer, _ = make_trainer()
    drawn = [with_advantage(sample, sign) for sample, sign in zip(samples(3, groups=1), signs, strict=False)]
    with pytest.raises(ValueError, match="a preference is one of each"):
        trainer.accumulate(make_policy(trainer), drawn, DPO)


def test_the_best_and_the_worst_sample_of_each_group_are_a_pair() -> None:
    def group(name: str, *rewards: float) -> ScoredGroup:
        return ScoredGroup(answers(*trajectories(name, BASE_ADAPTER, len(rewards))), rewards, "a", 0, True)

    groups = [group("a", 0.5, 1.0, 0.0, 0.75), group("b", 1.0, 1.0), group("c", 1.0), group("d", 0.0, 0.1)]
    prepared = prepare(groups, DPO, RewardHistory())
    made = [(answer(sample)[1], advantage(sample), sample.group) for sample in prepared.batch.samples]
    assert made == [(5, 1.0, 0), (6, -1.0, 0), (4, -1.0, 3), (5, 1.0, 3)]
    assert prepared.drop_reasons == (None, DropReason.ZERO_VARIANCE, DropReason.SINGLE, None)
    assert prepared.batch.step_scale == pytest.approx(6 / 9)


def test_a_truncated_answer_is_in_no_pair_if_truncated_ones_are_masked() -> None:
    best, *others = trajectories("g", BASE_ADAPTER, 3)
    cut = replace(best, finish_reason=FinishReason.LENGTH)
    group = ScoredGroup(answers(cut, *others), (3.0, 2.0, 1.0), "a", 0, True)
    for masked, chosen in ((False, 4), (True, 5)):
        prepared = prepare([group], changed(DPO, mask_truncated=masked), RewardHistory())
        assert [answer(sample)[1] for sample in prepared.batch.samples] == [chosen, 6]
