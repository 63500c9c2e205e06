"""Who holds the device's memory, and who gives way when it is short: cached prefixes, rollouts, the youngest rows."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from harness import Harness, make_harness
from lora import random_adapter
from micro_steps import MicroSteps
from tiny import tiny_model

from mlx_parallm.core.requests import RequestFailed, RequestFinished, WorkClass
from mlx_parallm.engine import memory
from mlx_parallm.errors import ContextLengthError
from mlx_parallm.kv.device_memory import MemoryAccount, default_budget

pytestmark = pytest.mark.ci

GIB = 2**30


LIVE, ROLLOUT = WorkClass.INFERENCE, WorkClass.TRAINING


def test_the_default_budget_is_what_weights_and_buffers_leave() -> None:
    assert default_budget(10 * GIB, GIB, 4 * GIB, None) == 4 * GIB
    assert default_budget(10 * GIB, GIB, 4 * GIB, 8 * GIB) == 2 * GIB
    assert default_budget(4 * GIB, GIB, 4 * GIB, None) == 0


def prompt(seed: int, length: int = 190) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(250) for at in range(length)]


def small(blocks: int = 20) -> tuple[Harness, MicroSteps, int]:
    """An engine with room for so many blocks, one of which has as many bytes as the last of these says. The bank takes
    less than three blocks."""
    training, model = MicroSteps(), tiny_model("llama")
    harness = make_harness(model, training=training, budget_tokens=64 * blocks, slots=2, max_rank=4)
    return harness, training, 64 * harness.runner.cache.layout.bytes_per_token


def held(harness: Harness) -> list[str]:
    """The requests that have a row, oldest first."""
    return [sequence.request.spec.request_id for sequence in harness.loop.scheduler.live]


def step(harness: Harness) -> None:
    harness.loop.step()
    harness.loop.check_integrity()


def test_memory_is_taken_from_prefixes_then_rollouts_then_the_youngest_rows_and_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_parallm.engine.memory._TIDY_EVERY_S", 0.0)  # training takes memory beside its units
    harness, training, block = small()
    device, cache = harness.runner.cache.device, harness.runner.cache
    adapter = harness.publish("a", random_adapter(harness.adapters.bank.layout, 1, rank=4))
    for number in range(3):
        harness.answer(f"cached {number}", prompt(number), 8)
    assert device.bytes_by_account()[MemoryAccount.PREFIXES] >= 9 * block
    assert device.bytes_by_account()[MemoryAccount.ADAPTERS] == harness.adapters.bank.nbytes > 0

    harness.submit("old", prompt(10), 200, adapter=adapter)
    harness.submit("rollout", prompt(11), 200, work_class=ROLLOUT)
    harness.submit("young", prompt(12), 200)
    while not all(map(harness.tokens, ("old", "rollout", "young"))):
        step(harness)
    assert held(harness) == ["old", "rollout", "young"]
    assert cache.evictions > 0, "they needed more than was free"

    training.held = 5 * block
    evicted, order = cache.evictions, []
    while "young" in held(harness):
        step(harness)
        order.append(tuple(held(harness)))
        training.held += block // 40
    assert cache.evictions > evicted, "prefixes gave way to training"
    assert harness.loop.scheduler.preemptions >= 2
    assert list(dict.fromkeys(order)) == [("old", "rollout", "young"), ("old", "young"), ("old",)]

    training.held = 0
    harness.submit("too long", prompt(13, 1200), 200)
    failed = harness.terminal("too long")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, ContextLengthError)
    assert "1400 tokens of KV memory, the server has room for 1280" in str(failed.error)
    harness.run()
    assert all(isinstance(harness.terminal(name), RequestFinished) for name in ("old", "rollout", "young"))


def test_an_update_waits_until_cached_prefixes_have_given_it_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arenas have shrunk, not only the accounts: before the first unit of training runs, the arrays have gone."""
    monkeypatch.setattr(memory, "_TIDY_BYTES_ON_CPU", 1)  # one block or one layer between two units
    harness, training, block = small(40)
    for number in range(8):
        harness.answer(f"cached {number}", prompt(number), 8)
    cache = harness.runner.cache
    before = sum(array.nbytes for array in cache.arrays())
    assert before >= 24 * block
    active = mx.get_active_memory()
    training.left, training.bytes_of_updates = 1, 30 * block
    harness.loop.after_call(0.0)
    while not training.done:
        assert harness.loop.step()
        harness.loop.check_integrity()
    training.bytes_of_updates = 0
    left = sum(array.nbytes for array in cache.arrays())
    assert left <= 10 * block
    assert active - mx.get_active_memory() >= before - left - block


def test_a_row_that_is_alone_takes_cached_prefixes_before_what_training_has() -> None:
    harness, training, block = small()
    harness.answer("cached", prompt(1), 8)
    training.held = 14 * block
    harness.submit("alone", prompt(2), 500)
    excess = []
    while harness.loop.step():
        harness.loop.check_integrity()
        excess.append(harness.runner.cache.device.excess)
    assert isinstance(harness.terminal("alone"), RequestFinished)
    assert harness.loop.scheduler.preemptions == 0
    assert max(excess) > 0, "it needed more than training left"
    assert excess[0] == 0
