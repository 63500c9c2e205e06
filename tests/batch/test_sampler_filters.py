"""What the filters keep: ties, edges, and the weighted quickselect."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch.distributions import Filters, nucleus_floor
from mlx_parallm.core.requests import SamplingParams

ROW = [0.5, 1.0, 0.25, 0.25, 0.125, 0.0]


def kept(row, *options):
    """Kept token ids of each of `options`, all in one batch over the same row."""
    filters = Filters.of(options, len(row))
    left = np.array(filters.apply(mx.array([row] * len(options), mx.float32)))
    return [np.flatnonzero(each).tolist() for each in left]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # a tie at the k-th place stays whole
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 1e-60}, [1]),  # 0 in fp32
        ({"top_p": 0.47}, [1]),  # 1 of 2.125 is 0.4706
        ({"top_p": 0.48}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2, 3]),
        ({"top_p": 0.95}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.25}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.67}, [0, 1]),  # 1 of 1.5: the mass is of what top-k left
        ({"top_k": 2, "top_p": 0.66}, [1]),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.5}, [0, 1]),
        ({"top_k": 6}, [0, 1, 2, 3, 4]),
    ],
)
def test_kept_tokens(options, expected):
    assert kept(ROW, SamplingParams(**options), SamplingParams(min_p=0.4))[0] == expected


def test_top_p_1_beside_a_nucleus_row_keeps_what_fp32_sums_cannot_see():
    row = [1.0, 1e-10, 3e-10, 2e-10]
    assert kept(row, SamplingParams(top_k=3), SamplingParams(top_k=3, top_p=0.5)) == [[0, 2, 3], [0]]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.7}, {"top_k": 9, "top_p": 0.9}])
def test_a_one_hot_row_keeps_its_token_and_a_uniform_row_keeps_all(options):
    hot = [0.0] * 300
    hot[123] = 1.0
    assert kept(hot, SamplingParams(**options)) == [[123]]
    assert kept([1.0] * 300, SamplingParams(**options)) == [list(range(300))]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=90).filter(any), st.floats(0, 1), st.integers(1, 20))
def test_halving_finds_the_floor_that_sorting_finds(values, share, sorted_at_once):
    """Integer weights and a mass in halves, up to their sum: exact arithmetic, many ties, odd widths."""
    mass = max(1, int(share * 2 * sum(values))) / 2
    row = mx.array([values], mx.float32)
    expected = min(v for v in values if sum(w for w in values if w > v) < mass)
    assert nucleus_floor(row, mx.array([[mass]]), sorted_at_once).item() == expected
    assert nucleus_floor(row, mx.array([[mass]]), len(values)).item() == expected


@pytest.mark.parametrize("scale", [0.05, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [49152, 50257])
def test_nuclei_of_a_real_vocabulary_are_exact(scale, top_p, vocab):
    rng = np.random.default_rng(int(scale * 100))
    weights = rng.normal(0, scale, (2, vocab))
    weights = np.exp(weights - weights.max(1, keepdims=True)).astype(np.float32)
    left = np.array(Filters.of([SamplingParams(top_p=top_p)] * 2, vocab).apply(mx.array(weights)))
    for row, mine in zip(weights.astype(np.float64), left, strict=True):
        ordered = np.sort(row)[::-1]
        larger = np.cumsum(ordered) - ordered
        tolerance = 2e-6 * row.sum()  # fp32 sums
        least = (larger < top_p * row.sum() - tolerance).sum()
        most = (larger < top_p * row.sum() + tolerance).sum()
        assert least <= (mine > 0).sum() <= most
        assert row[mine > 0].min() >= row[mine == 0].max(initial=0)
        assert mine.max() == 1


# ---- top-k over blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [True, False])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), top_k=st.integers(1, 700), ties=st.booleans())
def test_top_k_keeps_what_a_full_sort_keeps(cpu, seed, top_k, ties):
    """Beyond and below the width at which the whole vocabulary is looked at; the tie at the k-th place stays whole."""
    rng = np.random.default_rng(seed)
    weights = rng.random(20_000, np.float32) ** 8
    weights = np.round(weights, 2) if ties else weights
    weights /= weights.max()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mlx_parallm.batch.distributions.on_cpu", lambda: cpu)
        left = np.array(Filters.of([SamplingParams(top_k=top_k)], weights.size).apply(mx.array(weights)[None]))[0]
    floor = np.sort(weights)[-top_k]
    assert np.array_equal(left, np.where(weights >= floor, weights, 0))
