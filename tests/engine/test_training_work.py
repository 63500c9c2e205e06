"""Micro-steps of training on the device thread beside live rows: nobody's tokens change, whatever they raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import Harness, make_harness
from micro_steps import MicroSteps
from tiny import tiny_model

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import RequestFinished, SamplingParams, WorkClass
from mlx_parallm.errors import DeviceLostError

PROMPTS = [[i, 3, 5, 7, 11, 13] * 4 for i in range(4)]


def wrong_shapes(logits: mx.array) -> object:
    return logits @ logits


def no_memory(logits: mx.array) -> object:
    mx.eval(logits)
    raise MemoryError("injected")


def gradient_of(model: nn.Module, shift: mx.array) -> mx.array:
    """Of a loss of the shared model, forwards and backwards."""

    def loss(shift: mx.array) -> mx.array:
        logits = model(mx.array([PROMPTS[0]])) + shift
        return nn.losses.cross_entropy(logits[0, :-1], mx.array(PROMPTS[0][1:])).mean()

    return mx.grad(loss)(shift)


def learning(
    faults: Mapping[int, Callable[[mx.array], object]] = MappingProxyType({}), **options: int
) -> tuple[Harness, MicroSteps]:
    """A micro-step after every decode step, as long as some wait. `faults`: raised in these micro-steps."""
    model = tiny_model("llama")

    def step(number: int) -> None:
        if fault := faults.get(number):
            fault(model(mx.array([PROMPTS[0]])))
        mx.eval(gradient_of(model, mx.zeros((263,))))

    training = MicroSteps(step=step)
    schedule = DeviceSchedule(training_time_share=1.0)
    return make_harness(model, training=training, schedule=schedule, **options), training


def submit_all(harness: Harness) -> None:
    """Greedy, sampled with penalties, a group, one that joins late."""
    harness.submit("greedy", PROMPTS[0], 30)
    harness.submit("sampled", PROMPTS[1], 30, sampling=SamplingParams(seed=4, presence_penalty=0.5))
    harness.step(5)
    harness.submit("group", PROMPTS[2] * 4, 20, n=3, sampling=SamplingParams(temperature=0.7, seed=9))


def spoken(harness: Harness) -> dict[str, list[int]]:
    keys = [("greedy", 0), ("sampled", 0), ("group", 0), ("group", 1), ("group", 2)]
    for request_id, _ in keys:
        assert isinstance(harness.terminal(request_id), RequestFinished)
    return {f"{request_id} {index}": harness.tokens(request_id, index) for request_id, index in keys}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    harness = make_harness()
    submit_all(harness)
    harness.run()
    return spoken(harness)


def test_rows_say_the_same_beside_training(undisturbed: dict[str, list[int]]) -> None:
    harness, training = learning()
    beside, step = list[int](), training.step
    training.step = lambda number: (beside.append(harness.loop.stats().running), step(number))
    training.left = 6
    submit_all(harness)
    harness.run()
    assert spoken(harness) == undisturbed
    assert (training.done, training.resets) == (6, 0)
    assert min(beside) > 0
    detail = harness.loop.stats().detail
    assert (detail["training_units_total"], detail["failed_training_units_total"]) == (6, 0)
    assert detail["training_seconds_total"] == harness.loop.stats().device_seconds.training > 0.0


@pytest.mark.parametrize("fault", [wrong_shapes, no_memory])
def test_a_failed_micro_step_costs_its_update_and_no_row(
    fault: Callable[[mx.array], object], undisturbed: dict[str, list[int]]
) -> None:
    harness, training = learning({0: fault, 2: fault})
    training.left = 1
    submit_all(harness)
    assert (training.begun, training.resets, training.waits()) == (1, 1, False)
    training.left = 3
    harness.run()
    assert spoken(harness) == undisturbed
    assert (training.begun, training.done, training.resets) == (3, 1, 2)
    stats = harness.loop.stats()
    assert stats.detail["failed_training_units_total"] == 2
    assert (stats.failed_steps_total, stats.preemptions_total) == (0, 0), "no row was recomputed"


def test_a_failed_update_does_not_bring_the_device_nearer_to_being_lost() -> None:
    """It may be the fault of what was trained. Eight faults of nobody's in a row are survived, after it as before."""
    harness, training = learning({0: no_memory})
    training.left = 1
    harness.loop.step()
    assert training.resets == 1
    for _ in range(8):
        with harness.loop.surviving():
            raise RuntimeError("nobody's fault")
    with pytest.raises(DeviceLostError), harness.loop.surviving():
        raise RuntimeError("nobody's fault")


# ---- what the loop tells training, and what it takes of memory -----------------------------------


def test_rollouts_that_yield_say_what_they_would_have_said(undisturbed: dict[str, list[int]]) -> None:
    harness, _ = learning()
    paused = []
    harness.submit("greedy", PROMPTS[0], 30)
    harness.submit("sampled", PROMPTS[1], 30, sampling=SamplingParams(seed=4, presence_penalty=0.5))
    harness.step(5)
    fields = {"n": 3, "sampling": SamplingParams(temperature=0.7, seed=9), "work_class": WorkClass.TRAINING}
    harness.submit("group", PROMPTS[2] * 4, 20, **fields)
    harness.run(check=lambda: paused.append(len({len(harness.tokens("group", index)) for index in range(3)}) > 1))
    assert any(paused), "they drew at different times"
    assert spoken(harness) == undisturbed


def test_what_training_holds_is_taken_from_the_pool_and_given_back(undisturbed: dict[str, list[int]]) -> None:
    """The batch shrinks, nothing fails, and every row says the same."""
    harness, training = learning(budget_tokens=1 << 13)
    cache, running = harness.runner.cache, []
    submit_all(harness)
    before = harness.loop.stats().running
    training.held = cache.device.budget_bytes  # all of it: only a row that is alone may go on
    while len(harness.tokens("greedy")) < 30:
        harness.loop.step()
        harness.loop.check_integrity()
        running.append(harness.loop.stats().running)
    assert running[-1] < before
    training.held = 0
    harness.run()
    assert spoken(harness) == undisturbed
