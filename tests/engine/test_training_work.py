"""Micro-steps of training on the device thread beside live rows: nobody's tokens change, whatever they raise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import Harness, make_harness
from tiny import tiny_model

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import RequestFinished, SamplingParams, WorkClass
from mlx_parallm.errors import DeviceLostError
from mlx_parallm.kv.arena import Arena

PROMPTS = [[i, 3, 5, 7, 11, 13] * 4 for i in range(4)]


class Training:
    """`core.DeviceWork`: micro-steps that run the shared model forwards and backwards.

    `faults`: raised in place of the gradient, in these micro-steps, counted from 0. A reset gives the rest up.
    """

    def __init__(self, model: nn.Module, faults: dict[int, Callable[[mx.array], object]] | None = None) -> None:
        self.model = model
        self.faults = faults or {}
        self.left = self.begun = self.done = self.resets = 0
        self.held = 0
        self.paces: list[float] = []
        self.watch: Callable[[], None] = lambda: None

    def waits(self) -> bool:
        return self.left > 0

    def advance(self) -> None:
        self.watch()
        number, self.begun = self.begun, self.begun + 1
        shift = mx.zeros((263,))
        if fault := self.faults.get(number):
            fault(self.model(mx.array([PROMPTS[0]])))
        mx.eval(mx.grad(self._loss)(shift))
        self.left -= 1
        self.done += 1

    @property
    def bytes_held(self) -> int:
        return self.held

    bytes_of_updates = peak_bytes = 0

    def pace(self, seconds: float) -> None:
        self.paces.append(seconds)

    def reset(self) -> None:
        self.left = 0
        self.resets += 1

    def _loss(self, shift: mx.array) -> mx.array:
        logits = self.model(mx.array([PROMPTS[0]])) + shift
        return nn.losses.cross_entropy(logits[0, :-1], mx.array(PROMPTS[0][1:])).mean()


def wrong_shapes(logits: mx.array) -> object:
    return logits @ logits


def no_memory(logits: mx.array) -> object:
    mx.eval(logits)
    raise MemoryError("injected")


def learning(faults: dict[int, Callable[[mx.array], object]] | None = None) -> tuple[Harness, Training]:
    """A micro-step after every decode step, as long as some wait."""
    model = tiny_model("llama")
    training = Training(model, faults)
    return make_harness(model, training=training, schedule=DeviceSchedule(training_time_share=1.0)), training


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
    beside: list[int] = []
    training.watch = lambda: beside.append(harness.loop.stats().running)
    training.left = 6
    submit_all(harness)
    harness.run()
    assert spoken(harness) == undisturbed
    assert (training.done, training.resets) == (6, 0)
    assert min(beside) > 0
    detail = harness.loop.stats().detail
    assert (detail["training_units_total"], detail["failed_training_units_total"]) == (6, 0)
    assert detail["training_seconds_total"] == harness.loop.stats().device_seconds.training > 0.0


def test_rows_do_not_wait_for_training_and_a_copy_of_an_arena_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, training = learning()
    monkeypatch.setattr("mlx_parallm.engine.memory._TIDY_BYTES_ON_CPU", 1)
    for number in range(40):
        harness.submit(str(number), [20 + number] * 300, 4)
    harness.run()
    harness.runner.cache.evict(harness.runner.cache.groups[0], 140)
    harness.submit("beside", PROMPTS[0], 60)
    units: list[str] = []
    training.watch = lambda: units.append("training")
    training.left = 10
    copy, forward = Arena.resize, harness.runner.begin

    def copied(arena: Arena, blocks: int, *most: float) -> bool:
        before, done = arena.array_bytes, copy(arena, blocks, *most)
        if arena.array_bytes != before:
            units.append("copy")
        return done

    monkeypatch.setattr(Arena, "resize", copied)
    monkeypatch.setattr(harness.runner, "begin", lambda *unit: (units.append("forward"), forward(*unit))[1])
    harness.run()
    assert isinstance(harness.terminal("beside"), RequestFinished)
    assert {"training", "copy", "forward"} <= set(units)
    assert ("training", "copy") not in pairwise(units)


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


def test_a_row_that_fails_leaves_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, training = learning()
    training.left = 4
    submit_all(harness)
    begin = harness.runner.begin

    def failing(*args: object) -> object:
        monkeypatch.setattr(harness.runner, "begin", begin)
        raise MemoryError("injected")

    monkeypatch.setattr(harness.runner, "begin", failing)
    harness.run()
    assert harness.loop.stats().failed_steps_total == 1
    assert (training.done, training.resets) == (4, 0)


def test_no_step_is_in_flight_in_a_micro_step() -> None:
    """Every token that was drawn has been told."""
    harness, training = learning()
    told: list[tuple[int, int]] = []
    training.watch = lambda: told.append((len(harness.tokens("row")), harness.loop.counters.steps))
    harness.submit("row", PROMPTS[0], 20)
    harness.until(lambda: harness.tokens("row"))
    training.left = 3
    harness.run()
    assert len(told) == 3
    assert all(tokens == steps > 0 for tokens, steps in told)


def test_training_is_something_to_do() -> None:
    harness, training = learning()
    assert harness.loop.step() is False
    training.left = 3
    assert [harness.loop.step() for _ in range(4)] == [True, True, True, False]
    assert training.done == 3


def test_a_server_that_does_not_train_has_nothing_of_it() -> None:
    harness = make_harness()
    harness.answer("row", PROMPTS[0], 5)
    assert harness.loop.stats().detail["training_units_total"] == 0


# ---- what the loop tells training, and what it takes of memory -----------------------------------


def test_each_unit_is_paced_by_the_schedule_in_force() -> None:
    harness, training = learning()
    training.left = 2
    harness.loop.step()
    harness.loop.scheduler.reschedule(DeviceSchedule(max_decode_stall_s=0.1))
    harness.loop.step()
    assert training.paces == [0.5, 0.1]
    assert harness.loop.stats().schedule.max_decode_stall_s == 0.1


def test_what_rows_have_waited_already_is_taken_from_the_next_unit() -> None:
    harness, training = learning()
    harness.submit("row", PROMPTS[0], 6)
    harness.until(lambda: harness.tokens("row"))
    harness.loop.step()
    training.left = 1
    harness.loop.scheduler.gap.add_wait_time(0.2)
    harness.run()
    assert training.paces[0] == pytest.approx(0.3, abs=0.02)


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
    model = tiny_model("llama")
    training = Training(model)
    harness = make_harness(model, training=training, budget_tokens=1 << 13)
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


def test_who_has_waited_for_training_is_told_the_next_token_at_once() -> None:
    """Not one step later, as when steps follow each other; then they do again."""
    harness, training = learning()
    harness.submit("r", PROMPTS[0], 40)
    harness.step(10)
    steps_ahead: list[int] = []
    training.watch = lambda: steps_ahead.append(harness.loop.counters.steps - len(harness.tokens("r")))
    training.left = 1
    while training.left:
        harness.loop.step()
    for _ in range(4):
        harness.loop.step()
        steps_ahead.append(harness.loop.counters.steps - len(harness.tokens("r")))
    assert steps_ahead == [0, 0, 1, 1, 1]
