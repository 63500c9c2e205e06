"""What an engine counts, as everybody may read it."""

from __future__ import annotations

from mlx_parallm.engine.figures import Histogram


def filled(histogram: Histogram, *values: float) -> Histogram:
    for value in values:
        histogram = histogram.with_value(value)
    return histogram


def test_histograms_of_two_base_models_are_added() -> None:
    one, other = filled(Histogram.of(0.5, 1.0), 0.25, 4.0), filled(Histogram.of(0.5, 1.0), 0.75)
    assert one.plus(other) == other.plus(one) == filled(Histogram.of(0.5, 1.0), 0.25, 0.75, 4.0)
