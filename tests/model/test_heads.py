"""Adapters of a linear that two modules with one matrix per attention head compute."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from family_checks import build
from lora import changes, merged, random_adapter
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, HeadParts, LinearSpec
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import AdaptedHeads, install_adapters
from mlx_parallm.train.context import LoraSpan, TrainingContext

HEADS, KEYS, VALUES, LATENT = 3, 32, 64, 96
PATH, PARTS = "at.kv_b_proj", HeadParts("at.embed_q", "at.unembed_out", HEADS, KEYS)
SPEC = LinearSpec(PATH, LATENT, HEADS * (KEYS + VALUES), PATH, parts=PARTS)
LAYOUT = AdapterLayout({PATH: SPEC}, {}, 1)
ADAPTERS = [random_adapter(LAYOUT, seed, rank) for seed, rank in ((1, 4), (2, 3))]


class World:
    """The two modules, quantized or not, and a bank with two adapters of rank 4 and 3."""

    def __init__(self, quantized: bool = False) -> None:
        mx.random.seed(0)
        bases = {PARTS.keys: MultiLinear(KEYS, LATENT, HEADS), PARTS.values: MultiLinear(LATENT, VALUES, HEADS)}
        if quantized:
            bases = {path: base.to_quantized(32, 8) for path, base in bases.items()}
        self.bases = bases
        self.bank = AdapterBank(LAYOUT, 2, 4, mx.float32)
        self.adapted = {path: AdaptedHeads(base, self.bank, SPEC, PARTS, path) for path, base in bases.items()}
        for slot, weights in enumerate(ADAPTERS, 1):
            for _ in self.bank.write(slot, weights):
                pass

    def expected(self, path: str, x: mx.array, transpose: bool, adapter: AdapterWeights | None) -> mx.array:
        """By a merged weight."""
        base = self.bases[path](x, transpose)
        if adapter is None:
            return base
        pair = adapter.pairs[PATH]
        plain = {PARTS.keys: MultiLinear(KEYS, LATENT, HEADS), PARTS.values: MultiLinear(LATENT, VALUES, HEADS)}
        change = dict(changes(plain, PATH, mx.array(pair.scale * (pair.a @ pair.b).T)))[path]
        return base + x @ (change.swapaxes(1, 2) if transpose else change)


def inputs(path: str, transpose: bool, rows: int, tokens: int) -> mx.array:
    """Queries have heads; latents that become keys and values have one for all."""
    to_latents = transpose == (path == PARTS.keys)
    shape = (rows, HEADS, tokens, KEYS if path == PARTS.keys else VALUES) if to_latents else (rows, 1, tokens, LATENT)
    return mx.random.normal(shape, key=mx.random.key(rows))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("path", "transpose"), [(p, t) for p in (PARTS.keys, PARTS.values) for t in (True, False)])
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [((1, 0, 2, 1), (1, 1, 1, 1)), ((2, 2), (1, 1)), ((0, 1, 2, 0, 2), (3, 4, 1, 1, 1))],
    ids=["several slots", "one slot", "chunks and single tokens"],
)
def test_each_token_uses_its_own_rows_adapter(
    slots: Sequence[int], lengths: Sequence[int], path: str, transpose: bool, quantized: bool
) -> None:
    world = World(quantized)
    x = inputs(path, transpose, sum(lengths), 1)
    with world.bank.forward(slots, lengths):
        got = world.adapted[path](x, transpose)
    for number, slot in enumerate(np.repeat(slots, lengths)):
        row = x[number : number + 1]
        want = world.expected(path, row, transpose, ADAPTERS[slot - 1] if slot else None)
        assert relative_error(got[number : number + 1], want) < 1e-5


@pytest.mark.parametrize("path", [PARTS.keys, PARTS.values])
def test_a_row_may_be_longer_than_its_new_tokens(path: str) -> None:
    """A model that expands the keys of all tokens that it keeps passes these."""
    world = World()
    x = inputs(path, path == PARTS.values, 1, 9)
    with world.bank.forward([1], [4]):
        got = world.adapted[path](x, path == PARTS.values)
    assert relative_error(got, world.expected(path, x, path == PARTS.values, ADAPTERS[0])) < 1e-5


def test_spans_of_a_pass_with_gradients_use_their_own_factors() -> None:
    world = World()
    pairs = [weights.pairs[PATH] for weights in ADAPTERS]
    params = [{PATH: {"a": mx.array(pair.a), "b": mx.array(pair.b)}} for pair in pairs]
    spans = (
        LoraSpan(2, params[0], pairs[0].scale),
        LoraSpan(1, {}, 1.0),
        LoraSpan(3, params[1], pairs[1].scale),
    )
    x = inputs(PARTS.values, True, 6, 1)
    with world.bank.using(TrainingContext(spans)):
        got = world.adapted[PARTS.values](x)
    for part, adapter in ((slice(0, 2), ADAPTERS[0]), (slice(2, 3), None), (slice(3, 6), ADAPTERS[1])):
        assert relative_error(got[part], world.expected(PARTS.values, x[part], True, adapter)) < 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear", "longcat_flash"])
def test_models_with_latent_attention_have_it_under_transformers_name(name: str) -> None:
    layout = adapter_layout(build(name))
    found = [spec for spec in layout if spec.target == "kv_b_proj"]
    assert found
    weights = random_adapter(layout, 1, targets=("kv_b_proj",))
    assert weights.pairs.keys() == {spec.path for spec in found}
    model, tokens = build(name), mx.arange(9)[None]
    install_adapters(model, bank := AdapterBank(layout, 1, 4, mx.float32))
    with bank.using(OneAdapter(weights, mx.float32)):
        got = model(tokens, cache=make_prompt_cache(model))
    plain = build(name)
    base, want = plain(tokens), merged(plain, weights)(tokens, cache=make_prompt_cache(plain))
    assert relative_error(want, base) > 0.01
    assert relative_error(got, want) < 2e-4
