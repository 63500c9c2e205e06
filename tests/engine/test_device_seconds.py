"""What the device's time goes to: decoding, prompts, training, and copying adapters."""

from __future__ import annotations

import time

from harness import make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.engine.figures import DeviceSeconds, Histogram


def test_a_request_takes_prefill_and_then_decode() -> None:
    harness, began = make_harness(), time.monotonic()
    harness.answer("one", [1, 2, 3] * 40, 1)
    seconds = harness.loop.stats().device_seconds
    assert seconds.prefill > 0.0
    assert (seconds.decode, seconds.training, seconds.other) == (0.0, 0.0, 0.0), "its prompt drew its only token"
    harness.answer("two", [7, 8, 9], 20)
    later = harness.loop.stats().device_seconds
    assert later.minus(seconds).decode > later.minus(seconds).prefill > 0.0
    assert sum((later.decode, later.prefill)) < time.monotonic() - began


def test_copying_an_adapter_is_other_work() -> None:
    model = tiny_model("llama")
    weights = random_adapter(layout_of(model), seed=1)
    harness = make_harness(model)
    harness.publish("tone", weights)
    seconds = harness.loop.stats().device_seconds
    assert seconds.other > 0.0
    assert seconds == DeviceSeconds(other=seconds.other)


# ---- histograms ------------------------------------------------------------------------------------


def filled(histogram: Histogram, *values: float) -> Histogram:
    for value in values:
        histogram = histogram.with_value(value)
    return histogram


def test_histograms_of_two_base_models_are_added() -> None:
    one, other = filled(Histogram.of(0.5, 1.0), 0.25, 4.0), filled(Histogram.of(0.5, 1.0), 0.75)
    assert one.plus(other) == other.plus(one) == filled(Histogram.of(0.5, 1.0), 0.25, 0.75, 4.0)
