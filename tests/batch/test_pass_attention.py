"""A pass leaves nothing that only the garbage collector would free."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from family_checks import Served

from mlx_parallm.batch.forward import LayerCache
from mlx_parallm.batch.parts import RowsOfPool
from mlx_parallm.batch.spans import Span


@pytest.mark.parametrize("name", ["olmo2", "gemma4_text", "glm4_moe_lite", "gemma2", "gpt_bigcode", "qwen3_5"])
def test_its_caches_and_keys_are_freed_at_once(name: str) -> None:
    runner = Served(name).runner
    row = runner.cache.open(8)
    assert row is not None
    gc.collect()
    gc.disable()
    try:
        mx.eval(runner.compute([Span(row, 0, 8)], list(range(8))))
        left = [each for each in gc.get_objects() if isinstance(each, LayerCache | RowsOfPool)]
    finally:
        gc.enable()
    assert left == []


def test_a_pass_after_the_pool_was_cleared_writes_into_the_new_arrays() -> None:
    runner = Served("llama").runner

    def step(start: int) -> None:
        row = runner.cache.open(start + 1)
        assert row is not None
        mx.eval(runner.compute([Span(row, start, 1)], [7]), runner.cache.arrays())

    step(0)
    runner.cache.clear()
    step(1)
    keys = runner.cache.groups[0].arena.keys[0]
    assert mx.any(keys != 0).item()
