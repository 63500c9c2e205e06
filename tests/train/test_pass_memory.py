"""A pass with gradients leaves nothing that only the garbage collector would free."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from family_checks import Served

from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.packed_pass import LearnedCache, RowsOfBranch


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["olmo2", "gemma2", "gpt_bigcode", "qwen3_5", "glm4_moe_lite"])
def test_its_caches_and_parts_are_freed_at_once(name: str, recomputed: bool) -> None:
    served = Served(name)
    model = TrainableModel(served.model, served.bank, served.plan, lambda *_: recomputed)
    path = next(iter(served.layout.linears))
    spec = served.layout.linears[path]
    params = {path: {"a": mx.ones(spec.a_shape(2)), "b": mx.ones(spec.b_shape(2))}}
    branches = [Branch(0, 3, (Bucket(2, 2, 0),))]

    def value(params: dict[str, dict[str, mx.array]]) -> mx.array:
        run = model.trunk(mx.array([1, 2, 3, 4, 5, 6, 7]), branches, [LoraSpan(7, params, 1.0)], learns=True)
        return run.hidden.sum()

    gc.collect()
    before = set(map(id, living()))
    gc.disable()
    try:
        mx.eval(mx.grad(value)(params))
        left = [each for each in living() if id(each) not in before]
    finally:
        gc.enable()
    assert left == []


def living() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, LearnedCache | RowsOfBranch)]
