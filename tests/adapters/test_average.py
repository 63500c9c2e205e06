"""The weighted mean of adapters: exact at full rank, the best approximation below it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from adapter_folders import DOWN0, HIDDEN, LAYOUT, Q0, Q1, V0, random_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.adapters.average import average
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import AdapterFileError, ConfigError

HEAD = LAYOUT.head.path


def product(pair: LoRAPair) -> np.ndarray:
    """What a pair adds to its linear, [in, out]."""
    return pair.scale * pair.a.astype(np.float64) @ pair.b.astype(np.float64)


def mean_of(adapters: list[AdapterWeights], shares: list[float], path: str) -> np.ndarray:
    spec = LAYOUT.find(path)
    mean = np.zeros((spec.in_features, spec.out_features))
    for share, adapter in zip(shares, adapters, strict=True):
        if path in adapter.pairs:
            mean += share / sum(shares) * product(adapter.pairs[path])
    return mean


def three() -> list[AdapterWeights]:
    """Three adapters of different ranks, scales and linears; one has the head, and one linear is of one adapter."""
    return [
        random_weights({Q0: 4, V0: 4, DOWN0: 4, HEAD: 4}, 2.0, seed=1),
        random_weights({Q0: 2, V0: 3, Q1: 2}, {Q0: 0.5, V0: 4.0, Q1: 1.0}, seed=2),
        random_weights({Q0: 1, DOWN0: 2, HEAD: 3}, 8.0, seed=3),
    ]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_at_full_rank_the_mean_is_exact() -> None:
    adapters, shares = three(), [0.5, 0.3, 0.2]
    mean = average(adapters, shares)
    assert set(mean.weights.pairs) == {Q0, V0, DOWN0, Q1, HEAD}
    for path, pair in mean.weights.pairs.items():
        assert relative(product(pair), mean_of(adapters, shares, path)) < 1e-6
    assert (mean.full_rank, mean.error) == (7, 0.0)
    ranks = {path: pair.rank for path, pair in mean.weights.pairs.items()}
    assert ranks == {Q0: 7, V0: 7, DOWN0: 6, Q1: 2, HEAD: 7}


def test_the_mean_of_experts_is_that_of_each_expert() -> None:
    """At full rank and below, where what is lost is that of all experts together."""
    one, other = (random_weights({Q0: rank}, float(rank), seed=rank) for rank in (2, 3))
    firsts = [weights.pairs[Q0] for weights in (one, other)]
    pairs = [(first, LoRAPair(-2 * first.a, first.b, first.scale)) for first in firsts]
    stacked = [AdapterWeights({Q0: LoRAPair(np.stack([a.a, b.a]), np.stack([a.b, b.b]), a.scale)}) for a, b in pairs]
    for rank in (None, 4):
        mean = average(stacked, [3, 1], rank)
        for expert in range(2):
            alone = average([AdapterWeights({Q0: pair[expert]}) for pair in pairs], [3, 1], rank)
            got = mean.weights.pairs[Q0]
            want = product(alone.weights.pairs[Q0])
            assert relative(product(LoRAPair(got.a[expert], got.b[expert], got.scale)), want) < 1e-6
            assert mean.error == pytest.approx(alone.error)


def test_weights_are_divided_by_their_sum_and_are_equal_by_default() -> None:
    adapters = three()
    counts, shares = average(adapters, [50, 30, 20]), average(adapters, [0.5, 0.3, 0.2])
    for path, pair in shares.weights.pairs.items():
        np.testing.assert_allclose(product(counts.weights.pairs[path]), product(pair), rtol=1e-5, atol=1e-5)
    plain = average(adapters, None)
    for path, pair in plain.weights.pairs.items():
        assert relative(product(pair), mean_of(adapters, [1, 1, 1], path)) < 1e-6
    huge = average(adapters, [5e307, 3e307, 2e307])  # their sum is finite, and so is their ratio
    assert relative(product(huge.weights.pairs[Q0]), mean_of(adapters, [5, 3, 2], Q0)) < 1e-6


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_a_lower_rank_is_the_best_one_and_its_loss_is_the_one_stated(rank: int) -> None:
    adapters, shares = three(), [0.5, 0.3, 0.2]
    mean = average(adapters, shares, rank)
    assert mean.weights.rank == rank
    lost, norms = [], []
    for path, pair in mean.weights.pairs.items():
        want = mean_of(adapters, shares, path)
        values = np.linalg.svd(want, compute_uv=False)
        lost.append(np.linalg.norm(product(pair) - want))
        norms.append(np.linalg.norm(want))
        assert lost[-1] == pytest.approx(np.linalg.norm(values[rank:]), abs=1e-5)
        assert mean.reductions[path].error == pytest.approx(lost[-1] / norms[-1], abs=1e-6)
    assert mean.error == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(norms), abs=1e-6)
    errors = dict(zip(mean.weights.pairs, np.divide(lost, norms), strict=True))
    assert errors[mean.worst] == max(errors.values()) > 0


@given(
    ranks=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    scales=st.lists(st.floats(-8, 8).filter(lambda scale: abs(scale) > 1e-3), min_size=4, max_size=4),
    shares=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_any_ranks_scales_and_weights(ranks: list[int], scales: list[float], shares: list[float]) -> None:
    """Also ranks whose sum is above the linear's own size, 16, which is then the rank of the mean."""
    pairs = zip(ranks, scales, strict=False)
    adapters = [random_weights({Q0: rank}, scale, seed=at) for at, (rank, scale) in enumerate(pairs)]
    mean = average(adapters, shares[: len(ranks)])
    assert mean.full_rank == min(sum(ranks), HIDDEN)
    want = mean_of(adapters, shares[: len(ranks)], Q0)
    assert np.linalg.norm(product(mean.weights.pairs[Q0]) - want) < 1e-5 * max(
        np.linalg.norm(share / sum(shares[: len(ranks)]) * product(adapter.pairs[Q0]))
        for share, adapter in zip(shares, adapters, strict=False)
    )


def test_adapters_that_change_nothing_have_a_mean_that_changes_nothing() -> None:
    """A new adapter's b is zero. The mean can be trained from: its a is not zero."""
    new = AdapterWeights({Q0: LoRAPair(np.ones((HIDDEN, 2), np.float32), np.zeros((2, HIDDEN), np.float32), 2.0)})
    mean = average([new, new], None, rank=1)
    assert not np.any(product(mean.weights.pairs[Q0]))
    assert np.any(mean.weights.pairs[Q0].a)
    assert mean.error == 0.0


@pytest.mark.parametrize(
    ("weights", "rank", "message"),
    [
        ([0.5, 0.5], None, "--weights: 2 for 3 adapters"),
        ([0.5, 0.5, float("nan")], None, "--weights: nan is not a finite number above 0"),
        ([0.5, float("inf"), 1], None, "--weights: inf is not a finite number above 0"),
        ([0.5, 0.5, 0], None, "--weights: 0 is not a finite number above 0; leave out"),
        ([0.5, -0.5, 1], None, "--weights: -0.5 is not"),
        (None, 0, "--rank: 0 is not between 1 and 7"),
        (None, 8, "--rank: 8 is not between 1 and 7"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(weights: list[float] | None, rank: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        average(three(), weights, rank)


def test_one_adapter_has_no_average() -> None:
    with pytest.raises(ConfigError, match="two adapters or more, got 1"):
        average(three()[:1], None)


def test_a_mean_too_large_for_float32_is_refused() -> None:
    large = random_weights({V0: 2}, 1e38)
    with pytest.raises(AdapterFileError, match=r"layers\.0\.self_attn\.v_proj is too large for float32"):
        average([large, large], None)
