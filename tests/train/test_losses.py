"""Every objective and its figures against a reference in float64, finite differences, and arithmetic by hand; and rows,
tokens and ratios at the edges."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from train.loss_reference import (
    Padding,
    Row,
    computed,
    mixed_rows,
    reference_gradient,
    reference_loss,
    row,
    token_batch,
    totals_of,
    uneven_rows,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.train.losses import loss, means

SINGLE = [each for each in Algorithm if each not in (Algorithm.DPO, Algorithm.KTO, Algorithm.DISTILLATION)]
"""Losses of one sequence at a time, without a teacher or an estimate over all samples."""


POLICY = [each for each in SINGLE if each is not Algorithm.CROSS_ENTROPY]
"""Those that weigh a token by how much the sampler differs from the trainer."""


ZONES = {"below": (-1.2, -0.6), "inside": (-0.15, 0.15), "above": (0.6, 1.0), "far above": (1.2, 8.0)}
"""Of log ratios. The dual clip of 3 lies between the last two."""


SETTINGS = loss_config(clip_low=0.2, clip_high=0.28, kl_coef=0.07, entropy_coef=0.03, max_completion_tokens=16)


PLAIN = Padding()


FLOAT32 = 1e-6
"""Eight roundings of 2^-24 and a little: inputs are exact in float32, each token takes an exp and a few products.
Where terms of both signs cancel, it is of the largest of them."""


def close(ours, expected, terms=()):
    """`terms`: arrays of what the expected values are sums of, if they may cancel."""
    scale = max(np.abs(np.concatenate([np.atleast_1d(x) for x in (*expected, *terms)])).max(), 1e-3)
    for got, want in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=FLOAT32, atol=FLOAT32 * scale)


def single(ratios, advantage, *, logp=None, mu_factor=1.0, group=0):
    """A row whose policy ratios, and π_old / μ, are these."""
    logp = np.full(len(ratios), -1.0) if logp is None else np.array(logp)
    old = logp - np.log(ratios)
    return Row(logp, old, old - np.log(mu_factor), logp, np.ones(len(ratios)), advantage, group)


def stats(rows, settings, padding=PLAIN):
    return means([loss(token_batch(rows, padding), totals_of(rows), settings)[1]])


def check_against_the_reference(rows, settings):
    value, gradient = computed(rows, settings)
    expected = reference_gradient(rows, settings)
    close([value], [reference_loss(rows, settings)], expected)
    close(gradient, expected)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("advantage", [0.8, -1.3])
@pytest.mark.parametrize("algorithm", SINGLE)
def test_loss_and_gradient_equal_the_reference(algorithm, advantage, zone):
    rng = np.random.default_rng(len(zone))
    rows = [row(rng, n, ZONES[zone], advantage, group) for n, group in ((4, 0), (1, 0), (6, 1))]
    settings = changed(SETTINGS, algorithm=algorithm)
    check_against_the_reference(rows, settings)


@pytest.mark.parametrize("algorithm", SINGLE)
def test_mixed_lengths_signs_and_groups_equal_the_reference_with_its_own_clip_range(algorithm):
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    settings = changed(SETTINGS, algorithm=algorithm, **bounds)
    rows = mixed_rows()
    check_against_the_reference(rows, settings)


@pytest.mark.parametrize("algorithm", SINGLE)
def test_each_token_has_its_own_advantage_and_weight(algorithm):
    rows, settings = uneven_rows(), changed(SETTINGS, algorithm=algorithm)
    check_against_the_reference(rows, settings)


@pytest.mark.parametrize("algorithm", SINGLE)
def test_the_scale_of_a_sample_is_that_of_its_loss_without_divergence_and_entropy(algorithm):
    scales = (0.25, 1.0, 2.0, 0.5, 1.0, 1.5, 0.75)
    rows = [replace(each, loss_scale=scale) for each, scale in zip(uneven_rows(), scales, strict=True)]
    check_against_the_reference(rows, changed(SETTINGS, algorithm=algorithm))


WEIGHED = {"token_weights": np.array([1.0, 2.0])}
NARROW = {"clip_low": 0.2, "clip_high": 0.2}
BY_HAND = {
    # A = 1 and weight 2 on the second: -(min(1.5, 1.2) + 2 · 0.5), and -(1.5 + 2 · 0.5)
    "ppo": (Algorithm.PPO, NARROW, [1.5, 0.5], 1.0, WEIGHED, -2.2, [0.0, -1.0]),
    "importance sampling": (Algorithm.IMPORTANCE_SAMPLING, {}, [1.5, 0.5], 1.0, WEIGHED, -2.5, [-1.5, -1.0]),
    # A = 1: min(1.5, 1.2) = 1.2 and min(0.5, 0.8) = 0.5; half of each, two tokens; the first is held
    "clipped": (Algorithm.GRPO, NARROW, [1.5, 0.5], 1.0, {}, -0.85, [0.0, -0.25]),
    # A = -1, the pessimistic bound: min(-1.5, -1.2) = -1.5 and min(-0.5, -0.8) = -0.8; the second is held
    "clipped, and bad": (Algorithm.GRPO, NARROW, [1.5, 0.5], -1.0, {}, 1.15, [0.75, 0.0]),
    # A = -2: up to 3 · 2 = 6; 2.5 is beneath the bound, 4 beyond it
    "dual clip": (Algorithm.GRPO, {"dual_clip": 3.0}, [2.5, 4.0], -2.0, {}, 5.5, [2.5, 0.0]),
    "no dual clip": (Algorithm.GRPO, {"dual_clip": np.inf}, [2.5, 4.0], -2.0, {}, 6.5, [2.5, 4.0]),
    # the ratio of the sequence is 4, so all its tokens are bounded
    "dual clip of a sequence": (Algorithm.GSPO, {"dual_clip": 3.0}, [2.0, 8.0], -2.0, {}, 6.0, [0.0, 0.0]),
    # ratios 4 and 1: the sequence's is √4 = 2; each token gets half of -2 A
    "gspo": (Algorithm.GSPO, {"clip_high": 3.0}, [4.0, 1.0], 0.5, {}, -1.0, [-0.5, -0.5]),
    # min(6, 1 + 4) · 2 · log π = 10 · -1, and its slope 10: a token beyond the cap keeps its gradient
    "cispo": (Algorithm.CISPO, {"clip_high": 4.0}, [6.0], 2.0, {}, 10.0, [-10.0]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_and_slopes_by_hand(name):
    algorithm, settings, ratios, advantage, weights, expected, expected_slopes = BY_HAND[name]
    value, (slopes,) = computed([replace(single(ratios, advantage), **weights)], loss_config(algorithm, **settings))
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "groups", "expected"),
    [
        (Algorithm.GRPO, (0, 0), 0.0),  # (-1/1 + 3/3) / 2
        (Algorithm.BNPO, (0, 1), 0.5),  # (-1 + 3) / (1 + 3), as over all tokens of TRL's local batch
        (Algorithm.DAPO, (0, 1), 0.5),  # (-1 + 3) / 4
        (Algorithm.DR_GRPO, (0, 0), 0.1),  # (-1 + 3) / (2 · 10)
        (Algorithm.GSPO, (0, 0), 0.0),
        (Algorithm.CISPO, (0, 0), 0.5),  # logp = -1: (1 - 3) / 4 with the sign of -A logp
    ],
)
def test_reductions_by_hand(algorithm, groups, expected):
    rows = [single([1.0], 1.0, group=groups[0]), single([1.0, 1.0, 1.0], -1.0, group=groups[1])]
    value, _ = computed(rows, loss_config(algorithm, max_completion_tokens=10))
    assert value == pytest.approx(-expected if algorithm is Algorithm.CISPO else expected, abs=1e-7)


@pytest.mark.parametrize("algorithm", SINGLE)
@pytest.mark.parametrize("split", [[1] * 7, [2, 2, 2, 1], [5, 2], [3, 4]])
def test_micro_batches_add_up_to_the_whole_however_it_is_split(algorithm, split):
    rows, settings = mixed_rows(), changed(SETTINGS, algorithm=algorithm)
    value, gradient = computed(rows, settings)
    ends = np.cumsum(split)
    parts = [computed(rows[end - n : end], settings, rows) for n, end in zip(split, ends, strict=True)]
    close([sum(part[0] for part in parts)], [value])
    close([line for part in parts for line in part[1]], gradient)


@pytest.mark.parametrize("algorithm", SINGLE)
@pytest.mark.parametrize("fill", [0.0, 3.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("extra", "left"), [(0, True), (1, False), (20, True)])
def test_what_lies_on_padding_how_much_and_on_which_side_changes_nothing(algorithm, fill, extra, left):
    rows, settings = mixed_rows(), changed(SETTINGS, algorithm=algorithm)
    value, gradient = computed(rows, settings, padding=Padding(fill=0.0))
    padding = Padding(extra, left, fill)
    other, slopes = computed(rows, settings, padding=padding)
    close([other], [value])
    close(slopes, gradient)
    measured, plain = stats(rows, settings, padding), stats(rows, settings, Padding(fill=0.0))
    assert measured == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("algorithm", SINGLE)
def test_a_row_without_trained_tokens_changes_nothing(algorithm):
    rows, settings = mixed_rows()[:2], changed(SETTINGS, algorithm=algorithm)
    nothing = np.zeros(0)
    empty = Row(nothing, nothing, nothing, nothing, nothing, float("nan"), 0)
    value, gradient = computed(rows, settings)
    other, slopes = computed([*rows, empty], settings, whole=rows)
    close([other], [value])
    close(slopes[:2], gradient)


@pytest.mark.parametrize("algorithm", SINGLE)
@pytest.mark.parametrize("other", ["old_logp", "sampling_logp", "ref_logp"])
def test_the_other_policies_have_no_gradient_even_where_they_are_made_of_the_trained_one(algorithm, other):
    batch, whole = token_batch(mixed_rows()), totals_of(mixed_rows())
    settings = changed(SETTINGS, algorithm=algorithm)
    still = mx.grad(lambda x: loss(replace(batch, logp=x, **{other: batch.logp}), whole, settings)[0])
    moving = mx.grad(lambda x: loss(replace(batch, logp=x, **{other: x}), whole, settings)[0])
    assert mx.array_equal(still(batch.logp), moving(batch.logp))


@pytest.mark.parametrize("algorithm", POLICY)
@pytest.mark.parametrize("log_ratio", [-300.0, 300.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_float32_leave_loss_and_gradient_finite(algorithm, log_ratio, advantage):
    logp = np.array([-400.0, -1.0])
    other = logp - np.array([log_ratio, 0])
    far = Row(logp, other, logp, 2 * logp - other, logp * 0, advantage, 0)
    value, gradient = computed([far], changed(SETTINGS, algorithm=algorithm))
    assert np.isfinite(value)
    assert np.isfinite(gradient[0]).all()


@pytest.mark.parametrize("algorithm", SINGLE)
def test_a_trained_token_that_is_not_a_number_is_not_hidden(algorithm):
    rows = mixed_rows()
    broken = replace(rows[2], logp=np.where(np.arange(9) == 4, np.nan, rows[2].logp))
    value, _ = computed([*rows[:2], broken, *rows[3:]], loss_config(algorithm))
    assert np.isnan(value)


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
    parts = [loss(token_batch(part), totals_of(rows), SETTINGS)[1] for part in (rows[:1], rows[1:5], rows[5:])]
    assert means(parts) == pytest.approx(stats(rows, SETTINGS), rel=1e-6)


def test_figures_that_cannot_be_known_are_absent():
    batch = replace(token_batch(mixed_rows()), ref_logp=None, entropy=None)
    whole = totals_of(mixed_rows())
    known = {"ratio_mean", "ratio_max", "clip_fraction", "dual_clip_fraction", "mismatch_kl"}
    assert set(means([loss(batch, whole, loss_config())[1]])) == known


@pytest.mark.parametrize("missing", ["ref_logp", "entropy"])
def test_a_coefficient_without_what_it_weighs_is_refused(missing):
    batch = replace(token_batch(mixed_rows()), **{missing: None})
    whole = totals_of(mixed_rows())
    with pytest.raises(ValueError, match="kl_coef" if missing == "ref_logp" else "entropy_coef"):
        loss(batch, whole, SETTINGS)
