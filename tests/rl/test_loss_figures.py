"""The figures of a loss, and rows, tokens and ratios at the edges."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from rl.loss_reference import (
    Padding,
    denominators_of,
    mixed_rows,
    token_batch,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.rl.objectives.losses import loss, means
from mlx_parallm.rl.objectives.token_losses import k3

SINGLE = [each for each in Algorithm if each not in (Algorithm.DPO, Algorithm.KTO, Algorithm.DISTILLATION)]
"""Losses of one sequence at a time, without a teacher or an estimate over all samples."""
POLICY = [each for each in SINGLE if each is not Algorithm.CROSS_ENTROPY]


SETTINGS = loss_config(clip_low=0.2, clip_high=0.28, kl_coef=0.07, entropy_coef=0.03, max_completion_tokens=16)


PLAIN = Padding()


FLOAT32 = 1e-6


def stats(rows, settings, padding=PLAIN):
    return means([loss(token_batch(rows, padding), denominators_of(rows), settings)[1]])


@pytest.mark.parametrize("algorithm", POLICY)
def test_figures_equal_the_reference(algorithm):
    rows = mixed_rows()
    settings = changed(SETTINGS, algorithm=algorithm, dual_clip=1.1 if algorithm is Algorithm.GSPO else 1.8)
    sums = algorithm in (Algorithm.PPO, Algorithm.IMPORTANCE_SAMPLING)
    log_ratios = [r.logp - (r.mu if algorithm is Algorithm.IMPORTANCE_SAMPLING else r.old) for r in rows]
    if algorithm is Algorithm.GSPO:
        log_ratios = [np.full(x.size, x.mean()) for x in log_ratios]
    ratio = np.exp(np.concatenate(log_ratios))
    sign = np.concatenate([np.full(r.logp.size, r.advantage) for r in rows])
    above, below = ratio > 1.28, ratio < 0.8
    clipped = np.where(sign > 0, above, below) if algorithm is not Algorithm.CISPO else above | below
    clipped &= algorithm is not Algorithm.IMPORTANCE_SAMPLING
    dual = (sign < 0) & (ratio > settings.dual_clip) & (algorithm is not Algorithm.CISPO and not sums)
    mismatch = np.concatenate([r.old - r.mu for r in rows])
    delta = np.concatenate([r.ref - r.logp for r in rows])
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_fraction": clipped.mean(),
        "dual_clip_fraction": dual.mean(),
        "mismatch_kl": (np.exp(mismatch) - mismatch - 1).mean(),
        "kl": (np.exp(delta) - delta - 1).mean(),
        "entropy": np.concatenate([r.entropy for r in rows]).mean(),
    }
    assert (0 < expected["clip_fraction"] < 1) == (algorithm is not Algorithm.IMPORTANCE_SAMPLING)
    assert (0 < expected["dual_clip_fraction"] < 1) == (algorithm is not Algorithm.CISPO and not sums)
    assert stats(rows, settings) == pytest.approx(expected, rel=1e-5)


def test_figures_of_micro_batches_are_means_over_all_tokens():
    rows = mixed_rows()
    parts = [
        loss(token_batch(part), denominators_of(part, rows), SETTINGS)[1] for part in (rows[:1], rows[1:5], rows[5:])
    ]
    assert means(parts) == pytest.approx(stats(rows, SETTINGS), rel=1e-6)


def test_figures_that_cannot_be_known_are_absent():
    batch = replace(token_batch(mixed_rows()), ref_logp=None, entropy=None)
    whole = denominators_of(mixed_rows())
    known = {"ratio_mean", "ratio_max", "clip_fraction", "dual_clip_fraction", "mismatch_kl"}
    assert set(means([loss(batch, whole, loss_config())[1]])) == known


@pytest.mark.parametrize("missing", ["ref_logp", "entropy"])
def test_a_coefficient_without_what_it_weighs_is_refused(missing):
    batch = replace(token_batch(mixed_rows()), **{missing: None})
    whole = denominators_of(mixed_rows())
    with pytest.raises(ValueError, match="kl_coef" if missing == "ref_logp" else "entropy_coef"):
        loss(batch, whole, SETTINGS)


def test_k3_is_never_negative_and_zero_where_the_two_agree():
    rng = np.random.default_rng(3)
    logp = rng.uniform(-10, 0, 40_000).astype(np.float32)
    for size in 10.0 ** np.arange(-8, 2):
        values = np.array(k3(mx.array(logp), mx.array(logp + rng.normal(0, size, logp.size).astype(np.float32))))
        assert values.min() >= 0
        assert np.isfinite(values).all()
    assert not np.array(k3(mx.array(logp), mx.array(logp))).any()


def test_the_mean_of_k3_is_the_kl_divergence():
    rng = np.random.default_rng(4)
    p, reference = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6) * 3)
    exact = float((p * np.log(p / reference)).sum())
    every = np.array(k3(mx.array(np.log(p), mx.float32), mx.array(np.log(reference), mx.float32)))
    assert (p * every).sum() == pytest.approx(exact, rel=1e-5)
    drawn = every[rng.choice(6, 50_000, p=p)]
    assert drawn.mean() == pytest.approx(exact, abs=4 * drawn.std() / np.sqrt(drawn.size))
