"""Versions that come and go in few slots: who waits, who makes way, what is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from harness import TINY, Harness, assert_same_tokens, make_harness, solo
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import prompts
from tiny import tiny_model

from mlx_parallm.adapters.cards import Residence
from mlx_parallm.adapters.residency import READ_AHEAD, Resident
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import RequestFailed, RequestFinished
from mlx_parallm.errors import AdapterUnavailableError


@pytest.mark.parametrize("copies", [0, 3, 16])
def test_ten_adapters_share_two_slots(copies: int) -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    adapters = [random_adapter(layout, seed, rank=1 + seed % 8) for seed in range(10)]
    harness = make_harness(model, slots=2, copies=copies)
    refs = [harness.publish(f"a{i}", weights) for i, weights in enumerate(adapters)]
    rows = prompts(30, 40, seed=10)
    for i, row in enumerate(rows):
        harness.submit(str(i), row, 6, adapter=refs[i % 10])
        harness.loop.step()
    harness.run(check=lambda: within(harness, copies))
    for i, row in enumerate(rows):
        reference = solo(merged(tiny_model("llama"), adapters[i % 10]), row, 6)
        assert_same_tokens(harness.tokens(str(i)), reference, TINY)


def test_of_a_version_in_its_files_alone_nothing_is_kept() -> None:
    """Millions of requests later, versions that were in a slot once cost no memory, and no time when a request ends."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=2, copies=1)
    for i in range(8):
        harness.answer(str(i), [1, 2, 3], 2, adapter=harness.publish(f"seldom{i}", random_adapter(layout, i)))
    gc.collect()
    kept = [str(each.version.ref) for each in gc.get_objects() if isinstance(each, Resident)]
    assert sum(ref.startswith("seldom") for ref in kept) <= 2 + 1


def within(harness: Harness, copies: int) -> None:
    assert harness.adapters.slots_used <= 2
    assert harness.adapters.copies <= max(copies, READ_AHEAD) + 1


def test_a_version_that_waits_gets_a_slot_though_another_never_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.adapters.residency._PATIENCE_S", 0.0)
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=1, max_rows=4)
    busy, rare = (harness.publish(name, random_adapter(layout, seed)) for seed, name in enumerate(("busy", "rare")))
    for i in range(8):
        harness.submit(f"busy {i}", [i, 1, 2], 6, adapter=busy)
    harness.submit("rare", [1, 2, 3], 4, adapter=rare)
    for i in range(400):
        if harness.tokens("rare"):
            break
        if i % 2:
            harness.submit(f"busy {i + 8}", [i % 200, 1, 2], 6, adapter=busy)
        harness.loop.step()
        harness.loop.check_integrity()
    assert harness.tokens("rare"), "starved"
    harness.run()


def test_a_version_that_made_way_for_nothing_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to give its slot up, and another slot came free first."""
    monkeypatch.setattr("mlx_parallm.adapters.residency._PATIENCE_S", 0.0)
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=2, max_rows=4)
    old, short, late = (harness.publish(name, random_adapter(layout, i)) for i, name in enumerate(("a", "b", "c")))
    harness.answer("again", [5, 6, 7], 2, adapter=old)
    harness.submit("long", [1, 2, 3], 240, adapter=old)
    harness.submit("short", [1, 2, 3], 12, adapter=short)
    harness.step(8)
    harness.submit("late", [1, 2, 3], 3, adapter=late)
    harness.until(lambda: harness.tokens("late"))
    assert len(harness.tokens("long")) < 240, "the slot that came free was the other one"
    harness.answer("after", [4, 5, 6], 3, adapter=old)
    for name in ("long", "short", "late", "after"):
        assert isinstance(harness.terminal(name), RequestFinished)


def test_rows_admitted_before_a_write_begins_keep_their_slot() -> None:
    """What is to be staged was found while the slot was idle."""
    model, row = tiny_model("llama"), [3, 1, 4, 1, 5]
    layout = layout_of(model)
    weights = random_adapter(layout, 1)
    harness = make_harness(model, slots=1)
    old = harness.publish("a", weights)
    new = harness.publish("b", random_adapter(layout, 2), staged=False)
    version = harness.adapters.registry.version(new)
    staged = harness.adapters.stage(version, random_adapter(layout, 2))
    assert harness.adapters.waits()
    harness.answer("row", row, 12, adapter=old)
    assert staged.exception(timeout=0) is None
    assert_same_tokens(harness.tokens("row"), solo(merged(tiny_model("llama"), weights), row, 12), TINY)


def test_a_version_that_is_asked_for_again_while_it_is_staged_for_nobody_is_told_of_too() -> None:
    model = tiny_model("llama")
    weights = random_adapter(layout_of(model), 1)
    harness = make_harness(model)
    ref = harness.publish("a", weights, staged=False)
    harness.submit("gone", [1, 2, 3], 4, adapter=ref)
    while harness.adapters._job is None:
        harness.loop.step()
    harness.adapters.advance()
    harness.loop.abort("gone")
    assert harness.adapters.waits(), "the job goes on"
    staged = harness.adapters.stage(harness.adapters.registry.version(ref))
    harness.run()
    assert staged.result(timeout=0) == ref


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_whose_adapter_cannot_be_read_again_fails_alone(others: int) -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=1, copies=0)
    lost = harness.publish("lost", random_adapter(layout, 1))
    kept = harness.publish("kept", random_adapter(layout, 2))
    harness.files.pop(next(root for root in harness.files if root.startswith("/lost")))
    harness.submit("needs lost", [1, 2, 3], 5, adapter=lost)
    harness.submit_all([[1, 2, 3]] * others, 5, adapter=kept)
    harness.run()
    failed = harness.terminal("needs lost")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, AdapterUnavailableError)
    assert not harness.tokens("needs lost")
    assert all(isinstance(harness.terminal(str(number)), RequestFinished) for number in range(others))


def test_an_adapter_of_scale_0_comes_out_as_one_that_changes_nothing() -> None:
    model = tiny_model("llama")
    pairs = random_adapter(layout_of(model), 5).pairs
    harness = make_harness(model, slots=1)
    ref = harness.publish("a", AdapterWeights({path: LoRAPair(pair.a, pair.b, 0.0) for path, pair in pairs.items()}))
    taken = harness.wait(harness.adapters.extract(harness.adapters.registry.version(ref)))
    assert taken.pairs.keys() == pairs.keys()
    assert all(not np.any(pair.scale * (pair.a @ pair.b)) for pair in taken.pairs.values())


def test_the_bank_is_made_when_an_adapter_needs_it_and_only_what_it_needs() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, max_rank=4, slots=64)
    harness.answer("r", [1, 2, 3], 4)
    assert harness.adapters.bank.nbytes == 0
    qv = random_adapter(layout, 1, rank=4, targets=QV)
    harness.publish("a", qv)
    assert harness.adapters.bank.nbytes == 4 * qv.nbytes, "four slots at first, slot 0 among them; no padding"
    for seed in range(2, 9):
        harness.publish(f"a{seed}", random_adapter(layout, seed, rank=4, targets=QV))
    assert harness.adapters.bank.nbytes == 16 * qv.nbytes


def test_slots_are_as_wide_as_the_largest_adapter_that_came() -> None:
    """And the ones before it stay as they were, also those of rows that run when it comes."""
    model, row = tiny_model("llama"), [2, 7, 1, 8]
    layout = layout_of(model)
    small, large = random_adapter(layout, 1, rank=8), random_adapter(layout, 2, rank=20)
    harness = make_harness(model, max_rank=64, slots=2)
    first = harness.publish("small", small)
    bank = harness.adapters.bank
    assert bank.nbytes == 3 * small.nbytes, "slot 0 and two more, of rank 8"
    harness.submit("running", row, 40, adapter=first)
    harness.until(lambda: harness.tokens("running"))
    second = harness.publish("large", large)
    assert bank.nbytes == 3 * large.nbytes * 24 // 20, "of rank 24"
    harness.answer("new", row, 12, adapter=second)
    assert_same_tokens(harness.tokens("running"), solo(merged(tiny_model("llama"), small), row, 40), TINY)
    assert_same_tokens(harness.tokens("new"), solo(merged(tiny_model("llama"), large), row, 12), TINY)
    taken = harness.wait(harness.adapters.extract(harness.adapters.registry.version(first)))
    assert all(np.array_equal(taken.pairs[path].a, pair.a) for path, pair in small.pairs.items())


def three_adapters(harness: Harness) -> Sequence[AdapterRef]:
    layout = harness.adapters.bank.layout
    return [harness.publish(name, random_adapter(layout, seed)) for seed, name in enumerate("abc")]


def test_a_version_admits_sequences_while_another_slot_will_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version waits; no sequence joins the first one, so the second one need not make way."""
    monkeypatch.setattr("mlx_parallm.adapters.residency._PATIENCE_S", 0.0)
    harness = make_harness(slots=2)
    one, two, three = three_adapters(harness)
    harness.submit("one", [1, 2, 3], 30, adapter=one)
    harness.submit("two", [1, 2, 3], 60, adapter=two)
    harness.until(lambda: harness.tokens("one") and harness.tokens("two"))
    harness.submit("waits", [4, 5, 6], 3, adapter=three)
    for number in range(3):
        harness.step(2)
        harness.submit(f"joins {number}", [4, 5, 6 + number], 3, adapter=two)
    harness.until(lambda: len(harness.tokens("joins 2")) == 3)
    assert not harness.tokens("waits")
    harness.until(lambda: harness.tokens("waits"))
    assert len(harness.tokens("two")) < 60, "it got the slot of the first one"
    harness.run()


def test_sequences_whose_version_made_way_wait_no_longer_than_those_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_parallm.adapters.residency._PATIENCE_S", 0.0)
    harness = make_harness(slots=1)
    hot, cold, colder = three_adapters(harness)
    harness.submit("runs", [1, 2, 3], 30, adapter=hot)
    harness.until(lambda: harness.tokens("runs"))
    harness.submit("cold", [4, 5, 6], 3, adapter=cold)
    harness.step(2)
    harness.submit("joins", [7, 8, 9], 3, adapter=hot)
    harness.until(lambda: harness.tokens("joins"))
    for name, adapter in (("again", hot), ("colder", colder)):
        harness.submit(name, [4, 5, 6], 3, adapter=adapter)
        harness.step(2)
    assert len(harness.tokens("runs")) < 30
    harness.run()
    answered = [name for name, event in harness.events if isinstance(event, RequestFinished)]
    assert answered == ["joins", "runs", "cold", "again", "colder"]


class Slow(Executor):
    """Begins what it is given at once, and ends nothing until `finish`."""

    def __init__(self) -> None:
        self.reads: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        self.reads.append((Future(), partial(function, *arguments)))
        self.reads[-1][0].set_running_or_notify_cancel()
        return self.reads[-1][0]

    def finish(self) -> None:
        """Ends the oldest read."""
        future, read = self.reads.pop(0)
        future.set_result(read())


def test_few_files_are_read_ahead_of_a_slot() -> None:
    harness = make_harness(slots=1, copies=0)
    layout = harness.adapters.bank.layout
    refs = [harness.publish(str(seed), random_adapter(layout, seed)) for seed in range(8)]
    harness.submit("runs", [1, 2, 3], 60, adapter=refs[0])
    harness.until(lambda: harness.tokens("runs"))
    reader = harness.adapters._reader = Slow()
    for number, ref in enumerate(refs[1:]):
        harness.submit(str(number), [1, 2, 3], 2, adapter=ref)
    harness.step(5)
    assert len(reader.reads) == READ_AHEAD
    while reader.reads:
        reader.finish()
    harness.step(5)
    assert not reader.reads, "their weights wait in memory for the slot"
    for _ in range(2000):
        harness.step()
        if reader.reads:
            assert len(reader.reads) <= READ_AHEAD
            reader.finish()
    assert all(len(harness.tokens(str(number))) == 2 for number in range(7))


def test_an_adapter_that_is_unloaded_while_its_files_are_read_is_forgotten() -> None:
    """Its only request is aborted. Another one is served meanwhile."""
    harness = make_harness(slots=1, copies=0)
    one, two, _ = three_adapters(harness)
    reader = harness.adapters._reader = Slow()
    harness.submit("one", [1, 2, 3], 3, adapter=one)
    harness.step(2)
    harness.loop.abort("one")
    harness.adapters.registry.unload("a")
    harness.submit("two", [1, 2, 3], 3, adapter=two)
    harness.step(2)
    reader.finish()
    harness.step(2)
    reader.finish()
    harness.run()
    assert len(harness.tokens("two")) == 3
    assert not harness.tokens("one")
    assert harness.adapters.copies == 0
    assert one not in harness.adapters._residents


def test_versions_in_slots_have_copies_while_no_file_holds_them_and_they_are_needed() -> None:
    harness = make_harness(copies=1)
    layout, registry = layout_of(tiny_model("llama")), harness.adapters.registry
    for seed in range(6):
        ref = harness.publish("a", random_adapter(layout, seed), saved=False)
    assert harness.adapters.slots_used == 6
    assert harness.adapters.copies == 3, "of the newest, and of the two that were live when it came"
    registry.set_files(registry.version(ref), root="/checkpoint")
    harness.answer("saved", [1, 2, 3], 2, adapter=ref)
    assert harness.adapters.copies == 2
    registry.unload("a")
    harness.answer("unloaded", [1, 2, 3], 2)
    assert harness.adapters.copies == 0


@pytest.mark.parametrize("units", [0, 1])
@pytest.mark.parametrize("ends", ["reset", "unload"])
def test_who_asks_for_weights_is_told_when_the_device_fails_or_the_base_model_goes(ends: str, units: int) -> None:
    """A rollback waits for them, and all later loads wait for the rollback."""
    harness = make_harness(slots=2)
    store, layout = harness.adapters, layout_of(tiny_model("llama"))
    ref = harness.publish("a", random_adapter(layout, 1))
    late = store.registry.version(harness.publish("late", random_adapter(layout, 2), staged=False))
    staged = store.stage(late, random_adapter(layout, 2))
    weights = store.extract(store.registry.version(ref))
    assert store.waits()
    for _ in range(units):
        store.advance()
    idle = store.evict_idle()
    getattr(store, ends)()
    with pytest.raises(AdapterUnavailableError):
        weights.result(timeout=0)
    if ends == "unload":
        with pytest.raises(AdapterUnavailableError):
            idle.result(timeout=0)
        with pytest.raises(AdapterUnavailableError, match="unloaded"):
            staged.result(timeout=0)
    else:
        harness.wait(idle)
        harness.wait(staged)


def test_a_fault_costs_nothing_though_the_version_has_waited_before(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness(slots=1)
    layout = layout_of(tiny_model("llama"))
    other, ref = (harness.publish(name, random_adapter(layout, i), staged=not i) for i, name in enumerate(("a", "b")))
    harness.submit("long", [1, 2, 3], 20, adapter=other)
    harness.step(2)
    harness.submit("gone", [1, 2, 3], 4, adapter=ref)
    harness.step(4)
    version = harness.adapters.registry.version(ref)
    assert harness.adapters.residence(version) is Residence.COPY, "it was read, and no slot is free"
    harness.loop.abort("gone")
    harness.run()
    write, faults = harness.adapters.bank.write, [RuntimeError("[metal::malloc]")]

    def failing_once(*given: Any) -> Iterator[None]:
        if faults:
            raise faults.pop()
        yield from write(*given)

    monkeypatch.setattr(harness.adapters.bank, "write", failing_once)
    harness.answer("served", [1, 2, 3], 4, adapter=ref)
    assert isinstance(harness.terminal("served"), RequestFinished)
    assert not faults
