"""Latent attention (MLA): the pool keeps a token's latent once, and rows equal their solo runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
import pytest
from family_checks import CONFIGURATIONS, Served
from harness import TINY, assert_same_tokens, make_harness, solo
from lora import layout_of, merged, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.kv.blocks import BLOCK_TOKENS


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("deepseek_v3")


def width(config: Mapping[str, Any]) -> int:
    """Numbers that the model's paper keeps for a token and layer: the latent, and one key with positions."""
    return config["kv_lora_rank"] + config["qk_rope_head_dim"]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_a_token_takes_one_latent_and_one_key_with_positions_in_each_layer(name: str) -> None:
    config, pool = CONFIGURATIONS[name], Served(name).runner.cache
    row = pool.open(5 * BLOCK_TOKENS)
    assert row is not None
    expected = config["num_hidden_layers"] * width(config) * 4
    assert pool.layout.bytes_per_token == expected
    assert pool.bytes_used == 5 * BLOCK_TOKENS * expected
    (group,) = pool.groups
    assert sum(array.nbytes for array in group.arena.arrays()) == group.allocator.total * BLOCK_TOKENS * expected


@pytest.mark.parametrize("size", [16, 128], ids=["expanded", "absorbed"])
def test_long_chunks_beside_single_tokens_equal_their_solo_runs(size: int) -> None:
    """Heads of 128 numbers are so much wider than the latents that these never become keys and values."""

    def model(adapter: AdapterWeights | None = None) -> nn.Module:
        plain = tiny_model("deepseek_v3", qk_nope_head_dim=size, v_head_dim=size)
        return plain if adapter is None else merged(plain, adapter)

    layout = layout_of(model())
    adapters = [None, *(random_adapter(layout, seed) for seed in (1, 2))]
    rows = [(text(length, length), adapter) for length, adapter in ((9, 0), (250, 1), (20, 2), (300, 0), (100, 2))]
    harness = make_harness(model(), max_batched_tokens=160)
    refs = [harness.publish(str(number), weights) if weights else None for number, weights in enumerate(adapters)]
    for number, (row, adapter) in enumerate(rows):
        harness.submit(str(number), row, 12, **({"adapter": refs[adapter]} if adapter else {}))
        harness.loop.step()
    harness.run()
    for number, (row, adapter) in enumerate(rows):
        assert_same_tokens(harness.tokens(str(number)), solo(model(adapters[adapter]), row, 12), TINY)
