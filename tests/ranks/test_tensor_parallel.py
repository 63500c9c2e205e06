"""A model split among ranks: which numbers of ranks work, what each rank holds, and that the parts make the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.bank import ModelSplit
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.extras.ranks.tensor_parallel import check_ranks, split_model

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}


@dataclass(frozen=True)
class Place:
    """A rank of a group of which there are no others: enough to divide weights, not to compute."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def parts(ranks: int, **overrides: Any) -> list[tuple[nn.Module, ModelSplit]]:
    """Each rank's part of the tiny llama."""
    models = [tiny_model("llama", **overrides) for _ in range(ranks)]
    return [(model, split_model(model, Place(rank, ranks))) for rank, model in enumerate(models)]


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(2, 6, 2), (3, 3, 1), (4, 3, 1)])
def test_each_rank_has_its_heads_and_missing_ones_are_zeros(ranks: int, heads: int, kv_heads: int) -> None:
    whole = tiny_model("llama", **NINE_HEADS).layers[0].self_attn
    mine = [model.layers[0].self_attn for model, _ in parts(ranks, **NINE_HEADS)]
    assert {(each.n_heads, each.n_kv_heads) for each in mine} == {(heads, kv_heads)}
    rows, columns = whole.q_proj.weight.shape[0], whole.o_proj.weight.shape[1]
    queries = mx.concatenate([each.q_proj.weight for each in mine])
    outputs = mx.concatenate([each.o_proj.part.weight for each in mine], axis=1)
    assert mx.array_equal(queries[:rows], whole.q_proj.weight)
    assert mx.array_equal(outputs[:, :columns], whole.o_proj.weight)
    assert not queries[rows:].any().item()
    assert not outputs[:, columns:].any().item()


def test_a_bias_is_padded_with_its_heads_and_added_once() -> None:
    whole = tiny_model("qwen2", **NINE_HEADS).layers[0].self_attn
    models = [tiny_model("qwen2", **NINE_HEADS) for _ in range(2)]
    for rank, model in enumerate(models):
        split_model(model, Place(rank, 2))
    keys = mx.concatenate([model.layers[0].self_attn.k_proj.bias for model in models])
    assert mx.array_equal(keys[: whole.k_proj.bias.size], whole.k_proj.bias)
    assert keys.size == whole.k_proj.bias.size // 3 * 4


def test_the_parts_of_an_adapter_make_its_whole_product() -> None:
    weights = random_adapter(layout_of(tiny_model("llama", **NINE_HEADS)), seed=1)
    splits = [split for _, split in parts(2, **NINE_HEADS)]
    for name in ("q_proj", "o_proj"):
        path = f"model.layers.1.self_attn.{name}"
        pair = weights.pairs[path]
        x = mx.random.normal((5, pair.a.shape[0]), key=mx.random.key(3))
        want = x @ mx.array(pair.a) @ mx.array(pair.b)
        mine = [split.part(path, pair) for split in splits]
        if name == "q_proj":
            got = mx.concatenate([x @ mx.array(each.a) @ each.b for each in mine], axis=1)[:, : want.shape[1]]
        else:
            padded = mx.pad(x, [(0, 0), (0, 2 * mine[0].a.shape[0] - x.shape[1])])
            halves = mx.split(padded, 2, axis=1)
            got = sum(half @ each.a @ mx.array(each.b) for half, each in zip(halves, mine, strict=True))
        assert mx.allclose(got, want, atol=1e-5).item()


def test_a_number_of_ranks_that_does_not_work_names_those_that_do() -> None:
    model = tiny_model("llama")  # 4 heads, 96 hidden features
    with pytest.raises(UnsupportedModelError, match=r"into 5 parts: .* these numbers of ranks work: 2, 3, 4$"):
        check_ranks(model, 5)


def test_an_architecture_that_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="architecture gemma2 cannot be split"):
        check_ranks(tiny_model("gemma2"), 2)
