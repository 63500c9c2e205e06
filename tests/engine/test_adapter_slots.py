"""Versions that come and go in few slots: who waits, who makes way, what is left behind."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import QV, every_target, layout_of, merged, random_adapter
from mixed_batch import prompts
from tiny import tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.cards import Residence
from mlx_parallm.adapters.residency import READ_AHEAD
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, VersionInfo
from mlx_parallm.core.requests import RequestFailed, RequestFinished
from mlx_parallm.engine.units import StagingUnit
from mlx_parallm.errors import AdapterTooLargeError, AdapterUnavailableError

TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""


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


def within(harness: Harness, copies: int) -> None:
    assert harness.adapters.slots_used <= 2
    assert harness.adapters.copies <= max(copies, READ_AHEAD) + 1


def test_looking_for_work_passes_over_no_version_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step looks for work, and there may be hundreds of versions."""
    model = tiny_model("llama")
    layout, harness = layout_of(model), make_harness(model, slots=2)
    for seed in range(5):
        harness.publish(f"a{seed}", random_adapter(layout, seed))
    harness.adapters.waits()
    assert (harness.adapters.slots_used, harness.adapters.copies) == (2, 3)
    looked_at: list[object] = []
    monkeypatch.setattr(harness.adapters, "unreachable", looked_at.append)
    assert not harness.adapters.waits()
    assert not looked_at
    harness.adapters.registry.unload("a0")
    harness.adapters.waits()
    assert looked_at, "a copy that nothing can ask for any more is dropped"


def test_a_copy_is_kept_until_nothing_can_ask_for_its_version_any_more() -> None:
    model = tiny_model("llama")
    layout, harness = layout_of(model), make_harness(model, slots=1)
    for seed in range(2):
        harness.publish(f"a{seed}", random_adapter(layout, seed))
    assert (harness.adapters.staged_total, harness.adapters.evicted_total) == (2, 1)
    with harness.adapters.registry.lease("a0"):
        harness.adapters.registry.unload("a0")
        harness.adapters.waits()
        assert harness.adapters.copies == 1, "a request has been given it, and comes soon"
    harness.adapters.waits()
    assert harness.adapters.copies == 0


def test_an_adapter_is_refused_if_the_bank_would_take_more_with_it_than_its_limit() -> None:
    layout = layout_of(tiny_model("llama"))
    weights = random_adapter(layout, 1, targets=("q_proj",))
    written = AdapterBank(layout, 2, 8, mx.float32)
    for _ in written.write(1, weights):
        pass
    AdapterBank(layout, 2, 8, mx.float32, written.nbytes).check_room(1, weights)
    with pytest.raises(AdapterTooLargeError):
        AdapterBank(layout, 2, 8, mx.float32, written.nbytes - 1).check_room(1, weights)


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


def test_a_unit_of_staging_brings_one_version_though_it_has_time_for_more() -> None:
    """Two that wait for the only free slot would be staged over each other, no row being admitted in between."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=2, max_rows=4)
    refs = [harness.publish(name, random_adapter(layout, i)) for i, name in enumerate("abcd")]
    harness.submit("long", [1, 2, 3], 60, adapter=refs[0])
    harness.until(lambda: harness.tokens("long"))
    staged = harness.adapters.staged_total
    for name, ref in (("first", refs[1]), ("second", refs[2])):
        harness.submit(name, [1, 2, 3], 3, adapter=ref)
    harness.loop.scheduler.admit()
    assert harness.adapters.waits(), "for the other slot"
    harness.loop._stage(StagingUnit(0.5))
    assert harness.adapters.staged_total == staged + 1
    harness.run()
    assert harness.adapters.staged_total == staged + 2
    assert len(harness.tokens("first")) == len(harness.tokens("second")) == 3


def test_a_version_is_written_a_short_unit_at_a_time_and_the_bank_grows_in_units_of_its_own() -> None:
    bank = make_harness().adapters.bank
    weights = random_adapter(layout_of(tiny_model("llama")), 1)
    first, second = (len(list(bank.write(1, weights))) for _ in range(2))
    groups = sum(bool(group.specs.keys() & weights.pairs.keys()) for group in bank.groups.values())
    assert (first, second) == (2 * groups, groups), "the second one finds room"


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


def test_a_request_whose_adapter_cannot_be_read_again_fails_alone() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=1, copies=0)
    lost = harness.publish("lost", random_adapter(layout, 1))
    kept = harness.publish("kept", random_adapter(layout, 2))
    harness.files.pop(next(root for root in harness.files if root.startswith("/lost")))
    harness.submit("needs lost", [1, 2, 3], 5, adapter=lost)
    harness.submit("needs kept", [1, 2, 3], 5, adapter=kept)
    harness.run()
    failed = harness.terminal("needs lost")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, AdapterUnavailableError)
    assert not harness.tokens("needs lost")
    assert isinstance(harness.terminal("needs kept"), RequestFinished)


def test_a_request_whose_adapter_cannot_be_read_again_hears_of_it_though_nothing_else_runs() -> None:
    model = tiny_model("llama")
    layout, harness = layout_of(model), make_harness(model, slots=1, copies=0)
    lost, _ = (harness.publish(name, random_adapter(layout, 1)) for name in ("lost", "kept"))
    harness.files.clear()
    harness.answer("needs lost", [1, 2, 3], 5, adapter=lost)
    assert isinstance(harness.terminal("needs lost"), RequestFailed)


def test_a_failed_write_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on the device is made anew: rows are recomputed, adapters staged again."""
    model, row = tiny_model("llama"), [3, 1, 4, 1, 5]
    layout = layout_of(model)
    weights = random_adapter(layout, 1)
    harness = make_harness(model)
    ref = harness.publish("a", weights)
    harness.submit("running", row, 30, adapter=ref)
    harness.step(8)
    bank = harness.adapters.bank
    original = type(bank).write

    def failing(self, slot, weights):
        units = original(self, slot, weights)
        yield next(units)
        raise MemoryError("injected")

    other = harness.adapters.registry.add("b", VersionInfo(4, 8.0, (), 0))
    monkeypatch.setattr(type(bank), "write", failing)
    with pytest.raises(MemoryError):
        harness.wait(harness.adapters.stage(other, random_adapter(layout, 2)))
    monkeypatch.undo()
    harness.run()
    assert_same_tokens(harness.tokens("running"), solo(merged(tiny_model("llama"), weights), row, 30), TINY)
    assert isinstance(harness.terminal("running"), RequestFinished)


def test_weights_come_out_as_they_were_published() -> None:
    """From a slot, and from a copy: ranks unpadded, the scale as it was."""
    model = tiny_model("llama")
    weights = random_adapter(layout_of(model), 5, rank=3, scale=4.0)
    harness = make_harness(model, slots=1)
    ref = harness.publish("a", weights)
    for place in (Residence.SLOT, Residence.COPY):
        version = harness.adapters.registry.version(ref)
        assert harness.adapters.residence(version) is place
        taken = harness.wait(harness.adapters.extract(version))
        assert taken.pairs.keys() == weights.pairs.keys()
        for path, pair in weights.pairs.items():
            assert np.array_equal(taken.pairs[path].a, pair.a)
            assert np.array_equal(taken.pairs[path].b, pair.b)
            assert taken.pairs[path].scale == 4.0
        harness.publish("b", random_adapter(layout_of(tiny_model("llama")), 6))


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


def test_a_version_that_is_urgent_finds_room_that_was_made_before_it_came() -> None:
    """Growing the bank takes longer than writing a slot: nobody is to wait for it between an update and its version."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=6)
    groups, units = harness.adapters.bank.groups.values(), []

    def publish(seed: int) -> None:
        weights = random_adapter(layout, seed, targets=every_target(layout))
        info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes, root=f"/{seed}")
        version = harness.adapters.registry.add("a", info)
        harness.files[info.root] = weights
        staged = harness.adapters.stage(version, weights, urgent=True)
        units.append(0)
        while not staged.done():
            harness.loop.step()
            units[-1] += 1
        harness.run()

    for seed in range(6):
        publish(seed)
        held = {group.a.shape[0] for group in groups}
        assert min(held) > min(seed + 2, 6), "and the next slot is there"
    assert held == {7}
    assert len(set(units[1:])) == 1, "so each but the first is only written"
    harness.loop.check_integrity()
