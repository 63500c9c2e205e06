"""When the engine looks after the memory of the KV pool."""

from __future__ import annotations

import pytest
from harness import make_harness

from mlx_parallm.kv.blocks import BLOCK_TOKENS


def test_memory_is_looked_after_when_a_row_takes_a_block_and_not_after_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So an arena grows for the next rows while one row alone grows, and the steps between two blocks do not wait."""
    monkeypatch.setattr("mlx_parallm.engine.memory._TIDY_EVERY_S", float("inf"))
    harness, lengths = make_harness(), list[int]()
    memory = harness.loop.memory
    tidy = memory.tidy

    def counted(others_wait: bool = False) -> bool:
        lengths.append(50 + len(harness.tokens("row")))
        return tidy(others_wait)

    monkeypatch.setattr(memory, "tidy", counted)
    harness.submit("row", [5] * 50, 90)
    harness.run()
    meanwhile = [length for length in lengths if 55 < length < 135]
    assert {length // BLOCK_TOKENS for length in (each + 5 for each in meanwhile)} == {1, 2}
    assert len(meanwhile) <= 4
