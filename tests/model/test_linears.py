"""Which linears adapters may change, found by what a pass calls."""

from __future__ import annotations

import re
from copy import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from family_checks import build
from lora import merged, random_adapter
from tiny import VOCAB_SIZE, tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import ALL_LINEAR
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import JoinedLinears, install_adapters

LAYER = "model.layers.0"


def refusals(model: nn.Module) -> dict[str, str]:
    return dict(adapter_layout(model).refused)


def test_experts_that_are_called_for_their_own_tokens_are_refused() -> None:
    layout = adapter_layout(build("dbrx"))
    experts = [path for path in layout.refused if ".experts." in path]
    assert experts
    assert not any(".experts." in path for path in layout.linears)
    assert "does not get all tokens" in layout.refused[experts[0]]


def test_a_linear_whose_weight_the_model_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    attention, call = type(model.layers[0].self_attn), type(model.layers[0].self_attn).__call__

    def reads(self: nn.Module, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        return call(self, x, *args, **kwargs) + 0 * (x @ self.o_proj.weight.T)

    monkeypatch.setattr(attention, "__call__", reads)
    refused = refusals(model)
    assert [path for path in refused if "embed" not in path] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    assert "reads by itself" in refused[f"{LAYER}.self_attn.o_proj"]


def test_a_linear_that_no_pass_calls_is_refused() -> None:
    model = tiny_model("llama")
    model.model.unused = nn.Linear(4, 4)
    assert "does not get all tokens" in refusals(model)["model.unused"]


@pytest.mark.parametrize(
    ("name", "routers"),
    [
        ("granitemoe", "block_sparse_moe.router.layer"),
        ("gpt_oss", "mlp.router"),
        ("gemma4_text", "router.proj"),
        ("qwen2_moe", "mlp.gate mlp.shared_expert_gate"),
        ("dbrx", ""),
        ("llama", ""),
    ],
)
def test_routers_are_found_by_what_they_give(name: str, routers: str) -> None:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    layout = adapter_layout(build(name, **(experts if name == "gemma4_text" else {})))
    chosen = {spec.path for spec in layout if spec.chooses}
    found = {re.sub(r"^\w+\.\w+\.\d+\.", "", path) for path in chosen}
    assert found == set(routers.split())


@pytest.mark.parametrize(("tokens", "names"), [(4, ("wk", "wq_b", "weights_proj")), (64, ("wk", "wq_b"))])
def test_an_indexer_only_chooses_whether_or_not_a_short_pass_needs_it(tokens: int, names: tuple[str, ...]) -> None:
    layout = adapter_layout(build("deepseek_v32", index_topk=tokens))
    still = {spec.path for spec in layout if spec.chooses}
    assert still == {f"model.layers.{i}.self_attn.indexer.{name}" for i in range(4) for name in names}
    assert still.isdisjoint(spec.path for spec in layout.named([ALL_LINEAR]))


@pytest.mark.parametrize(
    ("name", "path", "embedding"),
    [
        ("llama", "lm_head", ""),
        ("cohere", "lm_head", "model.embed_tokens"),
        ("gpt2", "lm_head", "model.wte"),
        ("lille-130m", "lm_head", "transformer.tok_embeddings"),
        ("gemma3n", "lm_head", "model.language_model.embed_tokens"),
        ("internlm2", "output", ""),
        ("gpt_neox", "model.embed_out", ""),
        ("kimi_vl", "language_model.lm_head", ""),
    ],
)
def test_the_head_is_the_module_whose_product_is_the_logits(name: str, path: str, embedding: str) -> None:
    model = build(name)
    head = adapter_layout(model).head
    assert head is not None
    assert (head.path, head.embedding) == (path, embedding)
    weight = dict(model.named_modules())[embedding or path].weight
    assert (head.out_features, head.in_features) == weight.shape


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "cohere"])
def test_an_adapter_of_the_head_changes_the_logits_and_no_embedding(name: str) -> None:
    layout, tokens = adapter_layout(build(name)), mx.arange(9)[None]
    assert layout.head is not None
    weights = random_adapter(layout, 1, targets=(layout.head.target,))
    model, plain = build(name), build(name)
    install_adapters(model, bank := AdapterBank(layout, 1, 4, mx.float32))
    with bank.using(OneAdapter(weights, mx.float32)):
        got = model(tokens)
    base = plain(tokens)
    want = merged(plain, weights)(tokens)
    assert relative_error(want, base) > 0.01
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("seed_oss", "lm_head", "whose weight the model reads by itself"),
        ("glm4_moe", "model.layers.1.mlp.gate", "which is no linear but a MoEGate"),
        ("afm7", "model.layers.0.self_attn.qkv_proj", "which is no linear but a FusedLinear"),
    ],
)
def test_what_the_models_own_code_multiplies_is_refused_with_the_reason(name: str, path: str, reason: str) -> None:
    layout = adapter_layout(build(name))
    assert layout.find(path) is None
    assert reason in layout.refused[path]


def test_linears_that_quantize_their_inputs_may_have_adapters() -> None:
    """Nothing is computed, because MLX has no such product on a CPU."""
    model = tiny_model("llama")
    attention = model.layers[1].self_attn
    attention.o_proj = linear = nn.QQLinear.from_linear(attention.o_proj)
    layout, path = adapter_layout(model), "model.layers.1.self_attn.o_proj"
    assert (layout.linears[path].out_features, layout.linears[path].in_features) == (64, 64)
    install_adapters(model, bank := AdapterBank(layout, 1, 4, mx.float32))
    assert attention.o_proj.base is linear
    with bank.using(OneAdapter(random_adapter(layout, 1, targets=("o_proj",)), mx.float32)):
        assert model(mx.arange(9)[None]).shape == (1, 9, VOCAB_SIZE)


def test_a_model_that_does_not_run_is_said_to() -> None:
    model = tiny_model("llama")
    model.model.norm = nn.RMSNorm(3)
    with pytest.raises(UnsupportedModelError, match="does not run"):
        adapter_layout(model)


@pytest.mark.parametrize("kind", ["plain", "with a bias", "quantized", "of several bits"])
def test_linears_of_one_input_give_what_each_gives_alone_whoever_is_called(kind: str) -> None:
    model = tiny_model("llama")
    attention = model.layers[0].self_attn
    names = ("q_proj", "k_proj", "v_proj")
    for number, name in enumerate(names):
        linear = attention[name]
        if kind == "with a bias":
            linear.bias = mx.random.normal((len(linear.weight),))
        elif kind != "plain":
            attention[name] = linear.to_quantized(32, 8 if kind == "of several bits" and number else 4)
    alone = {name: copy(attention[name]) for name in names}
    layout = adapter_layout(model)
    install_adapters(model, AdapterBank(layout, 1, 4, mx.float32))
    x, y = (mx.random.normal((3, 1, 64), key=mx.random.key(seed)) for seed in range(2))
    calls = [("v_proj", x), ("q_proj", x), ("q_proj", x), ("k_proj", y), ("k_proj", x), ("v_proj", x), ("q_proj", y)]
    for name, given in calls:
        assert relative_error(attention[name](given), alone[name](given)) < 1e-6


def test_joined_linears_have_their_weights_once() -> None:
    linears = [nn.Linear(256, outputs) for outputs in (256, 64, 64)]
    mx.eval([linear.parameters() for linear in linears])
    before = mx.get_active_memory()
    joined = JoinedLinears(linears)
    mx.eval([linear.parameters() for linear in linears])
    assert mx.get_active_memory() - before < 1024
    assert mx.array_equal(joined.linear.weight, mx.concatenate([linear.weight for linear in linears]))
