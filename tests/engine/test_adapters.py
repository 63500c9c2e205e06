"""Many adapters in one batch: each row equals its adapter merged into the base and run alone."""

from __future__ import annotations

import random

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, Solo, assert_same_tokens, make_harness, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from lora import QV, layout_of, merged, random_adapter
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from tiny import FAMILIES, tiny_model

from mlx_parallm.adapters.store import READ_AHEAD
from mlx_parallm.adapters.versions import VersionInfo
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterRef,
    RequestFailed,
    RequestFinished,
    Residence,
    SamplingParams,
    SequenceOutput,
)
from mlx_parallm.errors import AdapterUnavailableError

TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def adapters_of(model: nn.Module) -> dict[str, AdapterWeights]:
    """Different ranks, scales and targets."""
    layout = layout_of(model)
    return {
        "all": random_adapter(layout, 1, rank=4),
        "qv": random_adapter(layout, 2, rank=8, targets=(*QV, "qkv_proj"), size=1.0, scale=0.5),
        "mlp": random_adapter(layout, 3, rank=1, targets=("up_proj", "gate_up_proj", "down_proj", "o_proj"), size=1.0),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(family: str) -> None:
    """Prefill, packed prefill and decode; rows of the base among them."""
    adapters = adapters_of(tiny_model(family))
    models = {name: merged(tiny_model(family), weights) for name, weights in adapters.items()}
    models["base"] = tiny_model(family)
    harness = make_harness(tiny_model(family), max_rows=6)
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()} | {"base": BASE_ADAPTER}
    rows = [(name, row) for name, row in zip(list(refs) * 4, prompts(12, 70, seed=3), strict=False)]
    for i, (name, row) in enumerate(rows):
        harness.submit(str(i), row, 12 + i, adapter=refs[name])
        for _ in range(i % 3):
            harness.loop.step()
    harness.run()
    changed = 0
    for i, (name, row) in enumerate(rows):
        assert isinstance(harness.terminal(str(i)), RequestFinished)
        assert_same_tokens(harness.tokens(str(i)), solo(models[name], row, 12 + i), TINY)
        changed += name != "base" and harness.tokens(str(i)) != solo(models["base"], row, 12 + i).tokens
    assert changed >= 6, "these adapters are to change what the base says"


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_prompt_logprobs_are_the_adapters_own(family: str) -> None:
    model = tiny_model(family)
    weights = random_adapter(layout_of(model), 4)
    harness = make_harness(model)
    ref = harness.publish("a", weights)
    row = prompts(1, 60, seed=8)[0] * 2
    harness.submit("s", row, 0, adapter=ref, prompt_logprobs=0)
    harness.run()
    logits = merged(tiny_model(family), weights)(mx.array([row]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    scores = harness.of("s")[0].logprobs
    for at in range(1, len(row)):
        assert scores[at].logprob == pytest.approx(expected[at - 1, row[at]].item(), abs=TINY)


def quantized_llama() -> nn.Module:
    model = tiny_model("llama", intermediate_size=128)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, part: isinstance(part, nn.Linear))
    mx.eval(model.parameters())
    return model


def with_lora_layers(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """mlx-lm's own LoRA layers over an unmerged base."""
    parts = dict(model.named_modules())
    layers = []
    for path, pair in weights.pairs.items():
        layer = LoRALinear.from_base(parts[path], r=pair.rank, scale=pair.scale)
        layer.lora_a, layer.lora_b = mx.array(pair.a), mx.array(pair.b)
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    model.eval()
    return model


def test_a_mixed_batch_over_a_4_bit_base_equals_its_adapters_unmerged() -> None:
    layout = layout_of(quantized_llama())
    adapters = {f"a{i}": random_adapter(layout, i, rank=2 + i, targets=() if i % 2 else QV) for i in range(4)}
    harness = make_harness(quantized_llama())
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()}
    rows = prompts(4, 50, seed=4)
    for (name, ref), row in zip(refs.items(), rows, strict=True):
        harness.submit(name, row, 10, adapter=ref, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    harness.run()
    for name, row in zip(refs, rows, strict=True):
        tokens = harness.tokens(name)
        logits = with_lora_layers(quantized_llama(), adapters[name])(mx.array([row + tokens]))[0]
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        outputs = [event for event in harness.of(name) if isinstance(event, SequenceOutput)]
        for at, output in enumerate(outputs):
            want = expected[len(row) - 1 + at, tokens[at]].item()
            assert output.logprobs[0].logprob == pytest.approx(want, abs=1e-3)


# ---- versions -----------------------------------------------------------------------------------


def slot_bytes(harness: Harness, ref: AdapterRef) -> list[bytes]:
    """Everything the bank has in the slot of a version."""
    slot = harness.adapters.pin(ref)
    harness.adapters.unpin(ref)
    arrays = [array for group in harness.adapters.bank.groups.values() for array in (group.a, *group.b.values())]
    return [np.array(array[slot]).tobytes() for array in arrays]


def test_a_publish_leaves_other_slots_bit_identical() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=3)
    kept = harness.publish("kept", random_adapter(layout, 1))
    before = slot_bytes(harness, kept)
    for seed in range(2, 8):
        harness.publish("other", random_adapter(layout, seed, rank=seed))
        if seed % 2:
            harness.submit(f"r{seed}", [1, 2, 3], 3, adapter=kept)
            harness.run()
        assert slot_bytes(harness, kept) == before


def test_an_adapter_that_changes_fewer_linears_leaves_nothing_of_the_slots_last_tenant() -> None:
    model, row = tiny_model("llama"), [9, 8, 7, 6]
    layout = layout_of(model)
    small = random_adapter(layout, 2, rank=1, targets=("v_proj",))
    harness = make_harness(model, slots=1)
    harness.publish("big", random_adapter(layout, 1, rank=8))
    ref = harness.publish("small", small)
    harness.submit("r", row, 12, adapter=ref)
    harness.run()
    assert_same_tokens(harness.tokens("r"), solo(merged(tiny_model("llama"), small), row, 12), TINY)


def test_rows_in_flight_keep_their_version_and_new_ones_get_the_new_one() -> None:
    model, row = tiny_model("llama"), prompts(1, 40, seed=6)[0]
    layout = layout_of(model)
    versions = [random_adapter(layout, seed) for seed in range(3)]
    harness = make_harness(model)
    books = harness.adapters.books
    refs = []
    for number, weights in enumerate(versions):
        harness.publish("policy", weights)
        refs.append(books.find("policy").ref)
        harness.submit(str(number), row, 40, adapter=refs[-1])
        for _ in range(5):
            harness.loop.step()
    harness.run()
    assert [str(ref) for ref in refs] == ["policy@1", "policy@2", "policy@3"]
    for number, weights in enumerate(versions):
        reference = solo(merged(tiny_model("llama"), weights), row, 40)
        assert_same_tokens(harness.tokens(str(number)), reference, TINY)


def test_the_same_name_with_new_weights_reuses_nothing_of_the_old() -> None:
    """Case 24: the same prompt under both versions, in a group whose rows are copies of one prefill."""
    model, row = tiny_model("llama"), prompts(1, 80, seed=7)[0]
    layout = layout_of(model)
    harness = make_harness(model)
    for number in range(3):
        weights = random_adapter(layout, 20 + number)
        ref = harness.publish("same", weights)
        harness.submit(str(number), row, 10, n=3, adapter=ref)
        harness.run()
        reference = solo(merged(tiny_model("llama"), weights), row, 10)
        for index in range(3):
            assert_same_tokens(harness.tokens(str(number), index), reference, TINY)


def test_preempted_rows_come_back_with_their_own_version() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    adapters = [random_adapter(layout, seed) for seed in range(4)]
    harness = make_harness(model, budget_tokens=320, slots=2)
    refs = [harness.publish(f"a{i}", weights) for i, weights in enumerate(adapters)]
    rows = prompts(8, 60, seed=9)
    for i, row in enumerate(rows):
        harness.submit(str(i), row, 50, adapter=refs[i % 4])
    harness.run()
    assert harness.loop.stats().preemptions_total > 0
    for i, row in enumerate(rows):
        reference = solo(merged(tiny_model("llama"), adapters[i % 4]), row, 50)
        assert_same_tokens(harness.tokens(str(i)), reference, TINY)


# ---- slots --------------------------------------------------------------------------------------


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
    assert len(harness.adapters.slots) <= 2
    assert len(harness.adapters.copies) <= max(copies, READ_AHEAD) + 1


def test_a_version_that_waits_gets_a_slot_though_another_never_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.adapters.store._PATIENCE_S", 0.0)
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
    monkeypatch.setattr("mlx_parallm.adapters.store._PATIENCE_S", 0.0)
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=2, max_rows=4)
    old, short, late = (harness.publish(name, random_adapter(layout, i)) for i, name in enumerate(("a", "b", "c")))
    harness.submit("again", [5, 6, 7], 2, adapter=old)
    harness.run()
    harness.submit("long", [1, 2, 3], 240, adapter=old)
    harness.submit("short", [1, 2, 3], 12, adapter=short)
    for _ in range(8):
        harness.loop.step()
    harness.submit("late", [1, 2, 3], 3, adapter=late)
    while not harness.tokens("late"):
        harness.loop.step()
    assert len(harness.tokens("long")) < 240, "the slot that came free was the other one"
    harness.submit("after", [4, 5, 6], 3, adapter=old)
    harness.run()
    for name in ("long", "short", "late", "after"):
        assert isinstance(harness.terminal(name), RequestFinished)


def test_versions_that_wait_for_the_only_free_slot_get_it_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a unit of staging has time for both: the first is not written over before its row is admitted."""
    monkeypatch.setattr("mlx_parallm.scheduler.gap._STAGING_SHARE", 1e6)
    monkeypatch.setattr("mlx_parallm.adapters.store._PATIENCE_S", 0.0)
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=2, max_rows=4)
    refs = [harness.publish(name, random_adapter(layout, i)) for i, name in enumerate(("a", "b", "c"))]
    harness.submit("long", [1, 2, 3], 200, adapter=refs[0])
    while not harness.tokens("long"):
        harness.loop.step()
    for name, ref in (("first", refs[1]), ("second", refs[2])):
        harness.submit(name, [1, 2, 3], 3, adapter=ref)
    while not (len(harness.tokens("first")) == len(harness.tokens("second")) == 3):
        harness.loop.step()
    assert len(harness.tokens("long")) < 100
    harness.run()


def test_rows_admitted_before_a_write_begins_keep_their_slot() -> None:
    """What is to be staged was found while the slot was idle."""
    model, row = tiny_model("llama"), [3, 1, 4, 1, 5]
    layout = layout_of(model)
    weights = random_adapter(layout, 1)
    harness = make_harness(model, slots=1)
    old = harness.publish("a", weights)
    new = harness.publish("b", random_adapter(layout, 2), staged=False)
    version, told = harness.adapters.books.version(new), list[Exception | None]()
    harness.adapters.stage(version, random_adapter(layout, 2), told.append)
    assert harness.adapters.waits()
    harness.submit("row", row, 12, adapter=old)
    harness.run()
    assert told == [None]
    assert_same_tokens(harness.tokens("row"), solo(merged(tiny_model("llama"), weights), row, 12), TINY)


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


def test_a_failed_write_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on the device is made anew: rows are recomputed, adapters staged again."""
    model, row = tiny_model("llama"), [3, 1, 4, 1, 5]
    layout = layout_of(model)
    weights = random_adapter(layout, 1)
    harness = make_harness(model)
    ref = harness.publish("a", weights)
    harness.submit("running", row, 30, adapter=ref)
    for _ in range(8):
        harness.loop.step()
    bank, told = harness.adapters.bank, list[Exception | None]()
    original = type(bank).write

    def failing(self, slot, weights):
        units = original(self, slot, weights)
        yield next(units)
        raise MemoryError("injected")

    other = harness.adapters.books.add("b", VersionInfo(4, 8.0, (), 0))
    monkeypatch.setattr(type(bank), "write", failing)
    harness.adapters.stage(other, random_adapter(layout, 2), told.append)
    while not told:
        harness.loop.step()
    monkeypatch.undo()
    assert isinstance(told[0], MemoryError)
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
        version = harness.adapters.books.version(ref)
        assert harness.adapters.residence(version) is place
        taken: list[AdapterWeights | None] = []
        harness.adapters.extract(version, taken.append)
        harness.run()
        assert taken[0].pairs.keys() == weights.pairs.keys()
        for path, pair in weights.pairs.items():
            assert np.array_equal(taken[0].pairs[path].a, pair.a)
            assert np.array_equal(taken[0].pairs[path].b, pair.b)
            assert taken[0].pairs[path].scale == 4.0
        harness.publish("b", random_adapter(layout_of(tiny_model("llama")), 6))


def test_the_bank_is_made_when_an_adapter_needs_it_and_only_what_it_needs() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, max_rank=4, slots=64)
    harness.submit("r", [1, 2, 3], 4)
    harness.run()
    assert harness.adapters.bank.nbytes == 0
    qv = random_adapter(layout, 1, rank=4, targets=QV)
    harness.publish("a", qv)
    assert harness.adapters.bank.nbytes == 4 * qv.nbytes, "four slots at first, slot 0 among them; no padding"
    for seed in range(2, 9):
        harness.publish(f"a{seed}", random_adapter(layout, seed, rank=4, targets=QV))
    assert harness.adapters.bank.nbytes == 16 * qv.nbytes


# ---- everything at once -------------------------------------------------------------------------


class World:
    """Adapters and references of the property test, made once."""

    def __init__(self) -> None:
        self.model = tiny_model("llama")
        layout = layout_of(self.model)
        self.rows = prompts(6, 60, seed=11)
        self.weights = [
            random_adapter(layout, seed, rank=1 + seed % 8, targets=QV if seed % 3 == 0 else ()) for seed in range(8)
        ]
        models = [merged(tiny_model("llama"), weights) for weights in self.weights] + [tiny_model("llama")]
        self.references: list[list[Solo]] = [[solo(model, row, 16) for row in self.rows] for model in models]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_interleaving_of_publishes_requests_aborts_and_unloads(world: World, data: st.DataObject) -> None:
    """Three names, few slots, little KV memory: every request gets the version it was given, or ends by abort."""
    harness = make_harness(
        world.model,
        slots=data.draw(st.integers(1, 4), label="slots"),
        copies=data.draw(st.integers(0, 3), label="copies"),
        budget_tokens=data.draw(st.sampled_from([512, 4000]), label="budget"),
        max_rows=5,
    )
    books = harness.adapters.books
    which: dict[AdapterRef, int] = {BASE_ADAPTER: len(world.weights)}
    requests: dict[str, tuple[AdapterRef, int, object]] = {}
    aborted: set[str] = set()

    def publish() -> None:
        number = data.draw(st.integers(0, len(world.weights) - 1), label="weights")
        name = data.draw(st.sampled_from("abc"), label="name")
        which[harness.publish(name, world.weights[number], staged=data.draw(st.booleans()))] = number

    def request() -> None:
        names = [name for name in "abc" if books.live(name)]
        lease = books.lease(data.draw(st.sampled_from(["base", *names]), label="adapter"))
        ref, row = lease.__enter__().ref, data.draw(st.integers(0, len(world.rows) - 1), label="row")
        rid = str(len(requests))
        requests[rid] = (ref, row, lease)
        harness.submit(rid, world.rows[row], 16, adapter=ref)

    def abort() -> None:
        if requests:
            rid = data.draw(st.sampled_from(sorted(requests)), label="abort")
            aborted.add(rid)
            harness.loop.abort(rid)

    def unload() -> None:
        names = [name for name in "abc" if books.live(name)]
        if names:
            books.unload(data.draw(st.sampled_from(names), label="unload"))

    for _ in range(data.draw(st.integers(3, 14), label="actions")):
        data.draw(st.sampled_from([publish, publish, request, request, request, abort, unload]), label="action")()
        for _ in range(data.draw(st.integers(0, 6), label="steps")):
            harness.loop.step()
            harness.loop.check_integrity()
        books.check_integrity()
    harness.run()
    for rid, (ref, row, lease) in requests.items():
        lease.__exit__(None, None, None)
        reference, got = world.references[which[ref]][row], harness.tokens(rid)
        assert_same_tokens(got, Solo(reference.tokens[: len(got)], reference.gaps[: len(got)]), TINY)
        if rid not in aborted:
            assert isinstance(harness.terminal(rid), RequestFinished), (rid, ref)
    assert harness.adapters.slots.pinned == 0
    books.check_integrity()


def test_a_version_that_is_urgent_finds_room_that_was_made_before_it_came() -> None:
    """Growing the bank takes longer than writing a slot: nobody is to wait for it between an update and its version."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=6)
    groups, units = harness.adapters.bank.groups.values(), []

    def publish(seed: int) -> None:
        weights = random_adapter(layout, seed)
        info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes, root=f"/{seed}")
        version, told = harness.adapters.books.add("a", info), []
        harness.files[info.root] = weights
        harness.adapters.stage(version, weights, told.append, urgent=True)
        units.append(0)
        while not told:
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
