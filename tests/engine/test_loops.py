"""Base models that are loaded side by side: shares of the device, one budget of memory, loads that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn
import pytest
from harness import engine_parts, greedy, make_harness, tokens_in
from tiny import tiny_model

from mlx_parallm.core.requests import Event
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.thread import ContinuousBatchProcessor, FairShare, Loading
from mlx_parallm.kv.device_memory import DeviceMemory


def parts(base: str, model: nn.Module, sharing: list[DeviceMemory], **options: Any) -> EngineParts:
    """The parts of a base model. `options` go to `make_harness`."""
    return engine_parts(make_harness(model, sharing=sharing, **options), base=base)


def loading(made: EngineParts) -> Loading:
    yield
    return made


class Two:
    """The base models a and b on the calling thread, and what they published."""

    def __init__(self, **options: Any) -> None:
        self.models = {"a": tiny_model("llama", seed=1), "b": tiny_model("qwen3", seed=2)}
        self.events: list[tuple[str, Event]] = []
        self.sharing: list[DeviceMemory] = []
        self.device = ContinuousBatchProcessor(lambda: pytest.fail("it is not started"))
        self.device._publish_events = self.events.extend  # type: ignore[method-assign]
        self.device._add(parts("a", self.models["a"], self.sharing, **options))
        self.load("b", **options)

    def load(self, base: str, **options: Any) -> None:
        done = self.device._load(loading(parts(base, self.models[base], self.sharing, **options)))
        while not done.done():
            self.device._fair_share.step()
        done.result()

    def submit(self, base: str, name: str, prompt: Sequence[int], max_tokens: int = 8) -> None:
        self.device._submit(greedy(name, prompt, max_tokens, base=base))

    def run(self) -> None:
        while self.device._fair_share.step():
            for engine in self.device._engines.values():
                engine.check_integrity()

    def tokens(self, name: str) -> list[int]:
        return tokens_in(event for at, event in self.events if at == name)


def prompt(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + at * 7) % 250 for at in range(length)]


def test_they_share_the_device_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much one of them has had while the other was idle. A unit of b takes as long as two of a."""
    shares, ran, clock, idle = FairShare(), list[str](), [0.0], {"b"}
    monkeypatch.setattr("mlx_parallm.engine.thread.time.monotonic", lambda: clock[0])

    def unit(member: str) -> bool:
        if member in idle:
            return False
        ran.append(member)
        clock[0] += {"a": 1.0, "b": 2.0}[member]
        return True

    for member in "ab":
        shares.add(member, partial(unit, member))
    for _ in range(1000):
        shares.step()
    idle.clear()
    ran.clear()
    shares.wake("b")
    for _ in range(30):
        shares.step()
    assert (ran.count("a"), ran.count("b")) == (20, 10)


def test_a_row_gets_the_memory_of_another_base_models_cached_prefixes() -> None:
    """The budget is 16 blocks of 64 tokens, of which the cached prefixes of a fill most."""
    two = Two(budget_tokens=16 * 64, max_length=1024)
    for number in range(7):
        two.submit("a", f"{number}", prompt(number, 120), 4)
        two.run()
    cached = two.device._refresh().kv_bytes_cached
    assert cached > two.sharing[0].budget_bytes // 2
    two.submit("b", "long", prompt(9, 800), 4)
    two.run()
    assert len(two.tokens("long")) == 4
    assert two.device._refresh().preemptions_total == 0


def test_a_row_waits_for_the_rows_of_another_base_model() -> None:
    two = Two(budget_tokens=16 * 64, max_length=1024)
    two.submit("a", "a", prompt(1, 600), 8)
    two.submit("b", "b", prompt(2, 600), 8)
    two.run()
    assert (len(two.tokens("a")), len(two.tokens("b"))) == (8, 8)
