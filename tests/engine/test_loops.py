"""Base models that are loaded side by side: shares of the device, one budget of memory, loads that come and go."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import assert_same_tokens, engine_parts, greedy, make_harness, solo, tokens_in
from mlx.utils import tree_flatten
from tiny import tiny_model

from mlx_parallm.core.device import PauseMode
from mlx_parallm.core.requests import Event, RequestFailed
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.thread import ContinuousBatchProcessor, FairShare, Loading
from mlx_parallm.kv.device_memory import DeviceMemory

TOLERANCE = 1e-5


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


def test_rows_of_two_base_models_equal_their_solo_runs() -> None:
    two = Two()
    for number in range(6):
        two.submit("ab"[number % 2], f"{number}", prompt(number), 12)
    two.run()
    for number in range(6):
        expected = solo(two.models["ab"[number % 2]], prompt(number), 12)
        assert_same_tokens(two.tokens(f"{number}"), expected, TOLERANCE)


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


def test_a_request_for_what_is_not_loaded_fails_and_is_not_answered_by_another() -> None:
    two = Two()
    two.device._unload("b")
    two.submit("b", "late", prompt(1))
    (event,) = [event for name, event in two.events if name == "late"]
    assert isinstance(event, RequestFailed)


def test_what_is_unloaded_frees_its_memory_and_counts_on() -> None:
    two = Two()
    two.submit("b", "one", prompt(1), 8)
    two.run()
    before, held = two.device._refresh(), mx.get_active_memory()
    weights = sum(array.nbytes for _, array in tree_flatten(two.models["b"].parameters()))
    del two.models["b"]
    two.device._unload("b")
    gc.collect()
    assert held - mx.get_active_memory() >= weights
    assert len(two.sharing) == 1
    after = two.device._refresh()
    assert after.generation_tokens_total == before.generation_tokens_total == 8
    assert {base: each.generation_tokens_total for base, each in after.bases.items()} == {"a": 0, "b": 8}
    assert after.device_seconds == before.device_seconds
    assert after.device_seconds.other > 0.0, "the load of b"


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
    assert sum(memory._held for memory in two.sharing) <= two.sharing[0].budget_bytes
    assert two.device._refresh().preemptions_total == 0


def test_a_row_waits_for_the_rows_of_another_base_model() -> None:
    two = Two(budget_tokens=16 * 64, max_length=1024)
    two.submit("a", "a", prompt(1, 600), 8)
    two.submit("b", "b", prompt(2, 600), 8)
    two.run()
    assert (len(two.tokens("a")), len(two.tokens("b"))) == (8, 8)


def test_a_load_that_fails_leaves_the_others_serving() -> None:
    two = Two()
    two.submit("a", "a", prompt(1), 30)

    def failing() -> Loading:
        yield
        raise RuntimeError("[malloc] no memory")

    done = two.device._load(failing())
    two.run()
    assert isinstance(done.exception(), RuntimeError)
    assert len(two.tokens("a")) == 30


def test_a_pause_holds_what_is_loaded_meanwhile() -> None:
    two = Two()
    two.device._unload("b")
    two.device._control(lambda engine: engine.pause(PauseMode.KEEP), paused=PauseMode.KEEP)
    two.load("b")
    two.submit("b", "b", prompt(1), 3)
    two.run()
    assert two.device._refresh().paused
    assert not two.tokens("b")
    two.device._control(lambda engine: engine.scheduler.resume(), paused=None)
    two.run()
    assert len(two.tokens("b")) == 3


def test_a_base_model_knows_whether_others_have_rows() -> None:
    two = Two()
    two.submit("b", "b", prompt(1), 3)
    two.device._fair_share.step()
    two.device._fair_share.step()
    assert two.device._others_run("a")
    assert not two.device._others_run("b")
    two.run()
    assert not two.device._others_run("a")
