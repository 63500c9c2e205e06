"""Uniforms, and the inverse CDF."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch.distributions import exp, inverse_cdf, streams, uniforms
from mlx_parallm.batch.sampling import RowSampling, plan_sampling, sample
from mlx_parallm.core.requests import SamplingParams

LAST = 1 - 2**-24
CHI2_999 = {7: 24.3, 15: 37.7, 63: 103.4}


def chi2(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=300).filter(any),
    st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, LAST]), st.integers(0, 2**24 - 1).map(lambda k: k / 2**24)),
)
def test_draw_is_the_first_token_whose_cumulative_weight_exceeds_the_point(weights, u):
    """Integer weights: every sum is exact, so the token is too."""
    cumulative = np.cumsum(weights)
    point = np.float32(u) * np.float32(cumulative[-1])
    token, total = inverse_cdf(mx.array([weights], mx.float32), mx.array([[u]]))
    assert token.item() == int(np.argmax(cumulative > point))
    assert total.item() == cumulative[-1]
    assert weights[token.item()] > 0


def test_no_token_of_zero_weight_is_drawn_at_the_ends():
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((64, 1000)) < 0.02, np.exp(rng.normal(0, 8, (64, 1000))), 0).astype(np.float32)
    weights[:, 500] = 1e-30
    for u in (0.0, 0.5, LAST):
        tokens, _ = inverse_cdf(mx.array(weights), mx.full((64, 1), u))
        assert (np.take_along_axis(weights, np.array(tokens)[:, None].astype(int), 1) > 0).all()


def test_a_rest_rounded_below_zero_draws_no_token_of_zero_weight():
    """The sum before the second block, found as cumulative - weight, comes out above the point that lies in it."""
    ulp = 2.0**-23
    weights = np.zeros((1, 128), np.float32)
    weights[0, 0], weights[0, 65] = 2 - ulp, 2.5 * ulp
    token, _ = inverse_cdf(mx.array(weights), mx.array([[1 - 1.5 * ulp]]))
    assert token.item() == 65


def test_a_point_past_the_last_sum_still_gives_a_token_that_may_be_drawn():
    token, _ = inverse_cdf(mx.array([[0.0, 3.0, 0.0, 1.0, 0.0]]), mx.array([[2.0]]))
    assert token.item() == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [(SamplingParams(), 8), (SamplingParams(temperature=2.0), 8), (SamplingParams(top_k=4), 4)],
)
def test_draws_follow_the_distribution(params, kept):
    logits = np.linspace(-2, 1, 8).astype(np.float32)
    seeds, positions = 250, 40
    rows = [RowSampling(SamplingParams(params.temperature, params.top_k, seed=s)) for s in range(seeds)]
    plan = plan_sampling(rows, 8)
    batch = mx.array(np.tile(logits, (seeds, 1)))
    drawn = np.concatenate([np.array(sample(batch, plan, [p] * seeds).tokens) for p in range(positions)])
    probabilities = np.exp(logits[8 - kept :].astype(float) / params.temperature)
    counts = np.bincount(drawn, minlength=8)
    assert counts[: 8 - kept].sum() == 0
    assert chi2(counts[8 - kept :], probabilities / probabilities.sum()) < CHI2_999[7]


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    along = uniforms(streams([7] * 20_000), np.arange(20_000))
    across = uniforms(streams(range(20_000)), np.zeros(20_000, int))
    for values in (along, across):
        assert chi2(np.bincount((values * 16).astype(int), minlength=16), np.full(16, 1 / 16)) < CHI2_999[15]
        assert 0 <= values.min() < values.max() < 1


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_neighbouring_seeds_and_positions_are_independent(seed_step, position_step):
    """n samples of one request have consecutive seeds."""
    seeds, positions = np.arange(20_000), np.arange(20_000) % 50 + 1
    here = uniforms(streams(seeds.tolist()), positions)
    there = uniforms(streams((seeds + seed_step).tolist()), positions + position_step)
    pairs = (here * 8).astype(int) * 8 + (there * 8).astype(int)
    assert chi2(np.bincount(pairs, minlength=64), np.full(64, 1 / 64)) < CHI2_999[63]


def test_a_uniform_depends_on_seed_and_position_alone():
    together = uniforms(streams([5, 6, 2**64 + 5, -1]), np.array([3, 3, 3, 0]))
    assert together[0] == uniforms(streams([5]), np.array([3]))[0] == together[2]
    assert together[0] != together[1]


def test_exp_is_exact_to_rounding_and_zero_at_minus_infinity():
    x = np.linspace(-80, 0, 5001, dtype=np.float32)
    np.testing.assert_allclose(np.array(exp(mx.array(x))), np.exp(x.astype(np.float64)), rtol=4e-6)
    assert exp(mx.array([0.0, -math.inf, -200.0])).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (5, 3), (2**64 - 1, 1_000_000)])
def test_a_uniform_is_that_of_splitmix64_at_its_position(seed, position):
    """So that the same seed gives the same tokens with a later version of this package too."""

    def mixed(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    start = mixed((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    drawn = mixed((start + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert uniforms(streams([seed]), np.array([position]))[0] == (drawn >> 40) / 2**24
