"""When the engine looks after the memory of the KV pool."""

from __future__ import annotations

import pytest
from harness import make_harness


def test_rows_do_not_wait_for_an_arena_that_grows_for_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large arena is copied layer by layer, which takes a small share of the time while rows run. New rows get the
    blocks of old prefixes meanwhile."""
    monkeypatch.setattr("mlx_parallm.engine.memory._TIDY_SHARE", 1e-9)
    monkeypatch.setattr("mlx_parallm.engine.memory._PAUSE_S", -1.0)
    harness = make_harness(max_batched_tokens=2048)
    group = harness.runner.cache.groups[0]
    for number in range(6):
        harness.answer(f"old {number}", [20 + number] * 300, 2)
    harness.submit("row", [5] * 50, 90)
    harness.loop.step()
    group.arena.resize(group.allocator.total + 40, 1)  # a layer has grown
    blocks, cached = group.allocator.total, group.allocator.cached
    for number in range(6):
        harness.submit(f"new {number}", [40 + number] * 300, 10)
    while harness.loop.stats().running + harness.loop.stats().waiting:
        assert group.allocator.total == blocks
        harness.loop.step()
        harness.loop.check_integrity()
    assert blocks - cached < 6 * 5, "there was too little room beside the old prefixes"
    assert all(len(harness.tokens(f"new {number}")) == 10 for number in range(6))
    harness.run()
    assert group.allocator.total == blocks + 40
