"""What the device's time goes to: decoding, prompts, training, and copying adapters."""

from __future__ import annotations

import time

from harness import make_harness


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
