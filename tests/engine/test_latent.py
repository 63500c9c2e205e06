"""Latent attention (MLA): the pool keeps a token's latent once, and rows equal their solo runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from family_checks import CONFIGURATIONS, Served
from harness import Solo, assert_same_tokens, make_harness, solo
from lora import layout_of, merged, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.weights import AdapterWeights, HeadParts, LinearSpec
from mlx_parallm.core.requests import RequestFinished
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.layer_state import KVLayout, LayerSpec
from mlx_parallm.model.linears import LatentHeads

TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("deepseek_v3")


# ---- memory ----------------------------------------------------------------------------------------


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


def test_8_bits_take_half_of_half_precision_and_the_scales() -> None:
    layout = KVLayout((LayerSpec(1, 576, 0, latent=512),), mx.bfloat16)
    assert layout.bytes_per_token == 2 * 576
    assert layout.quantized(8).bytes_per_token == 576 + 4 * 576 // 64


# ---- rows ------------------------------------------------------------------------------------------


def test_rows_that_share_prefixes_and_are_preempted_equal_their_solo_runs(model: nn.Module) -> None:
    system, budget = text(150, 0), 700
    rows = [[*system[:start], *text(own, own)] for start, own in ((150, 1), (150, 40), (100, 60), (0, 90), (150, 20))]
    alone = [solo(model, row, 30) for row in rows]
    harness = make_harness(model, budget_tokens=budget)
    for round_ in range(2):
        for number, row in enumerate(rows):
            harness.submit(f"{round_} {number}", row, 30)
        harness.run()
        for number, reference in enumerate(alone):
            assert isinstance(harness.terminal(f"{round_} {number}"), RequestFinished)
            assert_same_tokens(harness.tokens(f"{round_} {number}"), reference, TINY)
    stats = harness.loop.stats()
    assert stats.preemptions_total
    assert stats.prefix_cache_hits_total >= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("length", [100, 128, 129])
def test_samples_of_a_prompt_share_it(model: nn.Module, length: int) -> None:
    prompt = text(length, 5)
    harness = make_harness(model)
    harness.answer("group", prompt, 8, n=3)
    reference: Solo = solo(model, prompt, 8)
    for sample in range(3):
        assert_same_tokens(harness.tokens("group", sample), reference, TINY)


# ---- two forms -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("of_head", "least"), [(128 + 128, 158), (192 + 256, 359)], ids=["DeepSeek V3", "GLM-4.7-Flash"]
)
def test_latents_become_keys_and_values_where_that_is_less_work(of_head: int, least: int) -> None:
    """Of a long row, 512 · (keys + values) for each token that is seen, and 1,152 - 64 - (keys + values) for each of
    them and each new token: the products' widths. Of a new row, always."""
    linear = LinearSpec("kv_b_proj", 512, of_head, "")
    heads = LatentHeads(None, linear, HeadParts("", "", 1, 128), None, None)  # type: ignore[arg-type]
    assert [heads.is_expanded(tokens, 1 << 40, 576) for tokens in (least - 1, least)] == [False, True]
    assert heads.is_expanded(65, 65, 576)
