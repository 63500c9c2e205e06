"""A rank that repeats the operations of rank 0, as they travel, has what rank 0 has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from lora import random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.app.parts import Parts
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.extras.ranks.follower import Follower
from mlx_parallm.extras.ranks.operations import Operation
from mlx_parallm.extras.ranks.parts import FollowingParts, LeadingParts
from mlx_parallm.extras.ranks.wire import decode, encode
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters

PROMPTS = ([7 * i % 250 for i in range(90)], [11 * i % 250 for i in range(70)])


@dataclass
class Inside:
    """Stands for `Leader`, with a follower in this process, which gets what would be sent."""

    operations: list[Operation] = field(default_factory=list)
    follower: Follower | None = None

    def repeat(self, operation: Operation) -> None:
        self.operations.append(operation)
        if self.follower is not None:
            self.follower.repeat(decode(encode(operation)[8:]))

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def engine(parts: Parts) -> tuple[BatchRunner, AdapterBank]:
    model = tiny_model("llama")
    layout = adapter_layout(model)
    split = None if parts.split is None else parts.split(model)
    plan = prepare(model)
    kv = plan.layout
    bank = AdapterBank(layout, 2, 4, kv.dtype, make_group=parts.linear_group(split))
    install_adapters(model, bank)
    device = DeviceMemory(1 << 24)
    cache = parts.cache(kv, device, 256, True, frozenset())
    return parts.runner(model, cache, bank, plan), bank


def pair_of_ranks() -> tuple[BatchRunner, AdapterBank, BatchRunner, AdapterBank]:
    """Rank 0 and a follower, which both compute the whole model: a group of one rank each."""
    group, inside = mx.distributed.init(), Inside()
    leading = engine(LeadingParts(group, inside))
    following = engine(FollowingParts(group))
    inside.follower = Follower(*following)
    return *leading, *following


def write(bank: AdapterBank, slot: int, weights: AdapterWeights) -> None:
    for _ in bank.write(slot, weights):
        pass


def run(runner: BatchRunner, rows: Sequence[KVRow], tokens: Sequence[Sequence[int]]) -> mx.array:
    """Logits of the last token of each row."""
    spans = in_order([Span(row, row.computed, len(ids)) for row, ids in zip(rows, tokens, strict=True)])
    ids = {id(row): ids for row, ids in zip(rows, tokens, strict=True)}
    logits = runner.last_logits(spans, mx.array([token for span in spans for token in ids[id(span.row)]]))
    mx.eval(logits, runner.cache.arrays())
    for span in spans:
        span.row.computed = span.stop
    order = [[id(span.row) for span in spans].index(id(row)) for row in rows]
    return logits[mx.array(order)]


def walk(runner: BatchRunner, bank: AdapterBank) -> mx.array:
    """Two prompts with an adapter each, a row forked from the first, and a step of all three."""
    for slot in (1, 2):
        write(bank, slot, random_adapter(bank.layout, seed=slot))
    rows = [KVRow(), KVRow()]
    for slot, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        runner.cache.open(len(prompt) + 1, into=row)
        row.adapter_slot = slot + 1
    run(runner, rows, PROMPTS)
    fork = runner.cache.fork(rows[0], 80, 81)
    assert fork is not None
    fork.adapter_slot = 1
    return run(runner, [*rows, fork], [[5], [6], [7]])


def test_a_follower_has_the_keys_values_and_factors_of_rank_0() -> None:
    leader, bank, follower, its_bank = pair_of_ranks()
    logits = walk(leader, bank)
    whole = walk(*engine(Parts()))
    assert mx.allclose(logits, whole, atol=1e-4).item()
    pairs = zip(leader.cache.arrays(), follower.cache.arrays(), strict=True)
    assert all(mx.array_equal(mine, its).item() for mine, its in pairs)
    assert any(array.any().item() for array in follower.cache.arrays())
    for name, group in bank.groups.items():
        assert mx.array_equal(group.a, its_bank.groups[name].a).item()
    leader.clear()
    assert sum(array.size for array in follower.cache.arrays()) == 0


def held(runner: BatchRunner) -> list[int]:
    """Bytes of the arrays of its KV pool."""
    return [array.nbytes for array in runner.cache.arrays()]


def test_a_follower_gives_memory_back_when_rank_0_does() -> None:
    """A layer at a time, as rank 0 does."""
    leader, _, follower, _ = pair_of_ranks()
    row = leader.cache.open(250)
    assert row is not None
    most = sum(held(leader))
    leader.cache.close(row)
    while leader.cache.tidy(1, quiet=True):
        assert held(follower) == held(leader)
        assert sum(held(leader)) < most
    assert sum(held(follower)) == sum(held(leader)) == 0


def test_a_follower_keeps_no_memory_that_rank_0_could_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _, follower, _ = pair_of_ranks()
    assert leader.cache.open(60) is not None
    before = held(leader)
    arena = leader.cache.stores[0].arena
    resize = arena.resize

    def limited(blocks: int, *most_bytes: float) -> bool:
        if blocks > arena.blocks:
            resize(blocks, 1)  # one layer
            raise RuntimeError("[metal::malloc] Unable to allocate 1073741824 bytes.")
        return resize(blocks, *most_bytes)

    monkeypatch.setattr(arena, "resize", limited)
    while leader.cache.open(250) is not None:
        pass  # as long as there are free blocks
    assert held(follower) == held(leader) == before
