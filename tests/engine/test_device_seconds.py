"""What the device's time goes to: decoding, prompts, training, and copying adapters."""

from __future__ import annotations

import time

from harness import make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.engine.figures import DeviceSeconds


def test_a_request_takes_prefill_and_then_decode() -> None:
    harness, began = make_harness(), time.monotonic()
    harness.submit("one", [1, 2, 3] * 40, 1)
    harness.run()
    seconds = harness.loop.stats().device_seconds
    assert seconds.prefill > 0.0
    assert (seconds.decode, seconds.training, seconds.other) == (0.0, 0.0, 0.0), "its prompt drew its only token"
    harness.submit("two", [7, 8, 9], 20)
    harness.run()
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
