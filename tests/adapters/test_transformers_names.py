"""Adapter files with the names of Transformers' modules fit mlx-lm's models, and PEFT finds the modules of what is
written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from family_checks import CONFIGURATIONS, ELSEWHERE, build
from lora import random_adapter
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file
from transformers_modules import linears_of

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import transformers_path, write_mlx_lm, write_peft
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair, plain_path
from mlx_parallm.errors import AdapterFileError
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters

DENSE_MLP = {f"model.layers.N.mlp.{name}_proj" for name in ("gate", "up", "down")}
PLAIN_QUERIES = {"model.layers.N.self_attn.q_proj"}
LOW_RANK_QUERIES = {f"model.layers.N.self_attn.q_{name}_proj" for name in ("a", "b")}
SHARED = {f"model.layers.N.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
ROUTER = {"model.layers.N.router.proj"}
NO_ATTENTION = {
    f"model.layers.N.mixer.{name}" for name in ("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj")
}
SHARED_MIXER = {f"model.layers.N.mixer.shared_experts.{name}_proj" for name in ("up", "down")}

FAMILIES: dict[str, tuple[str, str, set[str]]] = {
    "llama": ("llama", "LlamaForCausalLM", set()),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", set()),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", set()),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", DENSE_MLP),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", set()),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForCausalLM", set()),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM", set()),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", set()),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM", set()),
    "gemma3 with images": ("gemma3", "Gemma3ForCausalLM", set()),
    "gemma4": ("gemma4", "Gemma4ForCausalLM", ROUTER),
    "gemma4_text": ("gemma4", "Gemma4ForCausalLM", ROUTER),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM", set()),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", DENSE_MLP | PLAIN_QUERIES),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", PLAIN_QUERIES),
    "kimi_vl": ("deepseek_v3", "DeepseekV3ForCausalLM", DENSE_MLP | PLAIN_QUERIES),
    "kimi_linear": ("kimi_linear", "KimiLinearForCausalLM", DENSE_MLP | SHARED | LOW_RANK_QUERIES),
    "glm4": ("glm4", "Glm4ForCausalLM", set()),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM", set()),
    "granite": ("granite", "GraniteForCausalLM", set()),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", set()),
    "granitemoehybrid dense": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", set()),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", set()),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM", set()),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", NO_ATTENTION | SHARED_MIXER),
    "mixtral": ("mixtral", "MixtralForCausalLM", set()),
    "phi3": ("phi3", "Phi3ForCausalLM", set()),
    "pixtral": ("mistral", "MistralForCausalLM", set()),
    "ministral3 with images": ("ministral3", "Ministral3ForCausalLM", set()),
    "mistral4 with images": ("mistral4", "Mistral4ForCausalLM", DENSE_MLP | PLAIN_QUERIES),
}
"""By configuration, Transformers' family and class with the same text part, and which of its linears the configuration
lacks."""

RENAMED_WHEN_READ = {
    "nemotron_h": ("backbone.", "model."),
    "kimi_linear": ("self_attn.f_", "self_attn.forget_gate.f_"),
}
"""What Transformers' own conversion_mapping changes in the names of a file that it reads, by family."""

_PLAIN = CONFIGURATIONS["llama"]
_LATENT = CONFIGURATIONS["deepseek_v3"] | {
    **{"model_type": "mistral4", "moe_intermediate_size": 64, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    **{"max_position_embeddings": 1000, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0, "rope_scaling": None},
}
_ROPE = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1000, "type": "default"}
CHANGED: dict[str, dict[str, Any]] = {
    "granitemoehybrid dense": {"num_local_experts": 0},
    "gemma3 with images": {"model_type": "gemma3", "text_config": CONFIGURATIONS["gemma3_text"]},
    "ministral3 with images": {
        "model_type": "mistral3",
        "text_config": _PLAIN | {"model_type": "ministral3", "rope_parameters": _ROPE},
    },
    "mistral4 with images": {"model_type": "mistral3", "text_config": _LATENT | {"rope_parameters": _ROPE}},
}
"""Settings of configurations that mlx-lm's tests lack."""


def model_of(name: str) -> Any:
    base, _, kind = name.partition(" ")
    return build(base if kind != "with images" else "llama", **CHANGED.get(name, {}))


def numberless(path: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", path)


def of_text_part(path: str) -> str:
    """Without the language part's own name, which classes of text models lack."""
    return path.replace("model.language_model.", "model.")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_of_transformers_is_found(name: str) -> None:
    family, kind, absent = FAMILIES[name]
    model = model_of(name)
    layout = adapter_layout(model)

    def known(path: str) -> bool:
        numbered = [path.replace(".N.", f".{number}.") for number in range(len(model.layers))]
        return any(layout.spelled(each) or layout.refusal(each) for each in numbered)

    linears = linears_of(family, kind)
    assert len(linears) > 4
    assert {path for path in linears if not known(path)} == absent


@pytest.mark.parametrize("name", FAMILIES)
def test_linears_are_written_under_transformers_names(name: str) -> None:
    family, kind, _ = FAMILIES[name]
    layout = adapter_layout(model_of(name))
    written = {
        numberless(transformers_path(spec.path, layout)) for spec in layout if not (spec.experts or spec.chooses)
    }
    read = {path.replace(*RENAMED_WHEN_READ.get(family, ("", ""))) for path in written}
    assert {of_text_part(path) for path in read} <= linears_of(family, kind)


@pytest.mark.parametrize("name", FAMILIES)
def test_mlx_lms_names_are_read_as_they_are_written(name: str, tmp_path: Path) -> None:
    layout = adapter_layout(model_of(name))
    weights = random_adapter(layout, 1, targets={spec.target for spec in layout})
    write_mlx_lm(tmp_path, weights, layout)
    read = read_adapter(tmp_path, layout, 8).weights
    assert read.pairs.keys() == weights.pairs.keys()
    assert all(np.array_equal(read.pairs[path].b, pair.b) for path, pair in weights.pairs.items())


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_5", "deepseek_v3", "nemotron_h", "lfm2_moe", "granitemoehybrid dense"]
)
def test_what_is_written_is_read_again_by_any_spelling(name: str, tmp_path: Path) -> None:
    layout = adapter_layout(model_of(name))
    every = random_adapter(layout, 1, targets={spec.target for spec in layout}).pairs
    weights = AdapterWeights({path: pair for path, pair in every.items() if pair.a.ndim == 2})
    write_peft(tmp_path, weights, layout, None)
    file = tmp_path / "adapter_model.safetensors"
    for spell in (lambda tensor: tensor, lambda tensor: re.sub(r"model\.(backbone|model)\.", "model.model.", tensor)):
        save_file({spell(tensor): array for tensor, array in load_file(file).items()}, file)
        read = read_adapter(tmp_path, layout, max_rank=4).weights
        assert read.pairs.keys() == weights.pairs.keys()
        for path, pair in weights.pairs.items():
            assert read.pairs[path].rank == pair.rank
            product = read.pairs[path].scale * read.pairs[path].a @ read.pairs[path].b
            assert np.allclose(product, pair.scale * pair.a @ pair.b, atol=1e-5)


def test_one_linear_of_transformers_may_be_two_here(tmp_path: Path) -> None:
    """The weights of Transformers' model with the adapter merged, as mlx-lm reads them, give the same logits."""
    name, tokens = "granitemoehybrid dense", mx.arange(9)[None]
    layout, rng = adapter_layout(model_of(name)), np.random.default_rng(0)
    path = "model.layers.0.shared_mlp.input_linear"
    a, b = (rng.normal(size=shape).astype(np.float32) / 8 for shape in ((128, 3), (3, 256)))
    whole = AdapterLayout({path: LinearSpec(path, 128, 256, path)}, {}, 4)
    write_peft(tmp_path, AdapterWeights({path: LoRAPair(a, b, 2.0)}), whole, None)
    weights = read_adapter(tmp_path, layout, 8).weights
    assert set(weights.pairs) == {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")}
    plain, served = model_of(name), model_of(name)
    tensors = dict(tree_flatten(plain.parameters()))
    for number in range(4):
        mlp = f"model.layers.{number}.mlp"
        parts = [tensors.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"model.layers.{number}.shared_mlp.input_linear.weight"] = mx.concatenate(parts)
        down = tensors.pop(f"{mlp}.down_proj.weight")
        tensors[f"model.layers.{number}.shared_mlp.output_linear.weight"] = down
    tensors[f"{path}.weight"] += 2.0 * mx.array(a @ b).T
    before = plain(tokens)
    plain.load_weights(list(plain.sanitize(tensors).items()))
    install_adapters(served, bank := AdapterBank(layout, 1, 4, mx.float32))
    with bank.using(OneAdapter(weights, mx.float32)):
        got = served(tokens)
    assert relative_error(plain(tokens), before) > 0.01
    assert relative_error(got, plain(tokens)) < 1e-5


def test_a_linear_of_which_a_part_is_trained_is_zero_elsewhere(tmp_path: Path) -> None:
    layout = adapter_layout(model_of("granitemoehybrid dense"))
    up = "model.layers.1.mlp.up_proj"
    weights = AdapterWeights({up: random_adapter(layout, 1).pairs[up]})
    write_peft(tmp_path, weights, layout, None)
    read = read_adapter(tmp_path, layout, 4).weights
    assert np.array_equal(read.pairs[up].b, weights.pairs[up].b)
    assert not read.pairs["model.layers.1.mlp.gate_proj"].b.any()


def test_two_scales_and_ranks_become_one_pair(tmp_path: Path) -> None:
    layout = adapter_layout(model_of("granitemoehybrid dense"))
    gate, up = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up"))
    pairs = {gate: random_adapter(layout, 1, 2, scale=0.5).pairs[gate], up: random_adapter(layout, 2, 4).pairs[up]}
    write_peft(tmp_path, AdapterWeights(pairs), layout, None)
    with pytest.raises(AdapterFileError, match="rank 4 is over --max-lora-rank 3"):
        read_adapter(tmp_path, layout, 3)
    read = read_adapter(tmp_path, layout, 4).weights
    assert {path: pair.rank for path, pair in read.pairs.items()} == {gate: 2, up: 4}
    for path, pair in pairs.items():
        product = read.pairs[path].scale * read.pairs[path].a @ read.pairs[path].b
        assert np.allclose(product, pair.scale * pair.a @ pair.b, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CONFIGURATIONS.keys() - ELSEWHERE.keys()))
@pytest.mark.slow
def test_no_two_linears_of_a_model_share_a_plain_path(name: str) -> None:
    paths = [plain_path(spec.path) for spec in adapter_layout(build(name))]
    assert len(set(paths)) == len(paths)
