"""Quantized weights of every packing that mlx-lm writes: loaded for a CPU, they compute what mlx-lm computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from family_checks import CONFIGURATIONS
from mlx.utils import tree_flatten
from mlx_lm.models import bitnet
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import quantize_model, save_config, save_model
from tiny import VOCAB_SIZE, build_model, tiny_config, tiny_tokenizer

from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.packing import dequantize, packed_like

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])
AFFINE = [{"mode": "affine", "bits": bits, "group_size": size} for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
FLOATS = [
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]
ROUNDING = 2e-5
"""Relative error of logits by rounding in float32: mlx-lm multiplies by packed weights, and we by dense ones."""

_WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
_OWN = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 257}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", **_WIDE),
    "tied": tiny_config("llama", **_WIDE, tie_word_embeddings=True),
    "qwen3_moe": tiny_config("qwen3_moe", **_WIDE, moe_intermediate_size=128),
    "gpt_oss": {**CONFIGURATIONS["gpt_oss"], **_OWN},
    "deepseek_v3": {**CONFIGURATIONS["deepseek_v3"], **_OWN, "kv_lora_rank": 64, "qk_nope_head_dim": 64},
    "qwen3_5": {**CONFIGURATIONS["qwen3_5"], **_OWN},
}


def name_of(packing: dict[str, Any]) -> str:
    return "{mode}-{bits}-{group_size}".format(**packing)


def saved(name: str, folder: Path, **options: Any) -> nn.Module:
    """mlx-lm's quantized model, which it also saves in the folder."""
    config = CONFIGS[name]
    model, config = quantize_model(build_model(config), config, **options)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    tiny_tokenizer().save_pretrained(folder)
    return model


def loaded(folder: Path) -> SharedModelManager:
    manager = SharedModelManager(str(folder), progress=False)
    left = [path for path, each in manager.model.named_modules() if "scales" in each or hasattr(each, "bits")]
    assert left == []
    assert {array.dtype for _, array in tree_flatten(manager.model.parameters())} == {mx.float32}
    return manager


def shape(layout: AdapterLayout) -> tuple[Any, ...]:
    return layout.linears, layout.refused, layout.head


def assert_same(name: str, manager: SharedModelManager, packed: nn.Module) -> None:
    """Its logits are those of the packed model, and adapters may change the linears of the model before it was
    packed."""
    assert relative_error(manager.model(TOKENS), packed(TOKENS)) < ROUNDING
    dense = build_model(CONFIGS[name])
    assert manager.card.parameters == mlx_lm.utils.get_total_parameters(dense)
    assert relative_error(packed(TOKENS), dense(TOKENS)) > 1e-3, "nothing was quantized"
    assert shape(manager.adapter_layout) == shape(adapter_layout(dense)) == shape(adapter_layout(packed))


@pytest.mark.parametrize("packing", [*AFFINE, *FLOATS], ids=name_of)
def test_linears_and_embeddings(packing: dict[str, Any], tmp_path: Path) -> None:
    packed = saved("llama", tmp_path, **packing)
    assert sum("scales" in each for each in packed.modules()) == 2 + 2 * 7
    assert_same("llama", loaded(tmp_path), packed)


@pytest.mark.parametrize("packing", [AFFINE[3], AFFINE[7], *FLOATS], ids=name_of)
@pytest.mark.parametrize("name", ["tied", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5"])
def test_tied_heads_experts_latent_attention_and_recurrent_layers(
    name: str, packing: dict[str, Any], tmp_path: Path
) -> None:
    packed = saved(name, tmp_path, **packing)
    kinds = {type(each) for each in packed.modules()}
    assert (QuantizedMultiLinear in kinds) == (name == "deepseek_v3")
    assert (QuantizedSwitchLinear in kinds) == (name in ("qwen3_moe", "gpt_oss", "deepseek_v3"))
    assert_same(name, loaded(tmp_path), packed)


def test_layers_that_are_packed_in_different_ways(tmp_path: Path) -> None:
    """As mlx-lm's recipes of mixed bits and its `dynamic_quant` write them: by path, and some layers not at all."""
    ways: dict[str, Any] = {
        "q_proj": {"group_size": 128, "bits": 6},
        "switch_mlp": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "gate": {"group_size": 64, "bits": 8},
        "lm_head": False,
    }

    def choose(path: str, _: nn.Module) -> Any:
        return next((dict(way) if way else way for part, way in ways.items() if part in path), True)

    packed = saved("qwen3_moe", tmp_path, group_size=32, bits=3, quant_predicate=choose)
    written = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert written["model.layers.0.self_attn.q_proj"]["bits"] == 6
    assert "scales" not in packed.lm_head
    assert_same("qwen3_moe", loaded(tmp_path), packed)


def test_weights_in_sixteen_bits_are_not_rounded_again(tmp_path: Path) -> None:
    model = build_model(CONFIGS["llama"])
    model.set_dtype(mx.bfloat16)
    packed, config = quantize_model(model, CONFIGS["llama"], group_size=32, bits=4)
    save_model(tmp_path, packed)
    save_config(config, tmp_path / "config.json")
    tiny_tokenizer().save_pretrained(tmp_path)
    manager = loaded(tmp_path)
    packed.update(nn.utils.tree_map(_widened, packed.parameters()))
    assert relative_error(manager.model(TOKENS), packed(TOKENS)) < ROUNDING


def _widened(array: mx.array) -> mx.array:
    return array if array.dtype == mx.uint32 else array.astype(mx.float32)


def test_experts_with_a_global_scale_each(tmp_path: Path) -> None:
    """mlx-lm multiplies by them on a GPU only, so that the reference is each expert's dequantized weight."""
    packed = saved("qwen3_moe", tmp_path, mode="nvfp4", group_size=16, bits=4, global_scale=True)
    experts = packed.layers[0].mlp.switch_mlp.up_proj
    assert experts.global_scale.shape == (4,)
    manager = loaded(tmp_path)
    weight = manager.model.layers[0].mlp.switch_mlp.up_proj.weight
    for number in range(4):
        want = mx.dequantize(
            experts.weight[number],
            experts.scales[number],
            group_size=16,
            bits=4,
            mode="nvfp4",
            global_scale=experts.global_scale[number],
        )
        assert mx.array_equal(weight[number], want)
    dense = build_model(CONFIGS["qwen3_moe"])
    assert shape(manager.adapter_layout) == shape(adapter_layout(dense)) == shape(adapter_layout(packed))
    assert relative_error(weight, dense.layers[0].mlp.switch_mlp.up_proj.weight) < 0.2
    assert relative_error(manager.model(TOKENS), dense(TOKENS)) < 0.6


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp8"])
def test_models_whose_activations_are_quantized_too(mode: str, tmp_path: Path) -> None:
    """MLX quantizes activations on a GPU only; here they are not."""
    packed = saved("llama", tmp_path, mode=mode, group_size=None, bits=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantize_activations": True}))
    stored, _ = mlx_lm.utils.load_model(tmp_path, lazy=True)
    assert isinstance(stored.lm_head, nn.QQLinear)
    assert shape(adapter_layout(stored)) == shape(adapter_layout(packed))
    assert_same("llama", loaded(tmp_path), packed)


@pytest.mark.parametrize("inverted", [False, True])
def test_ternary_weights(inverted: bool) -> None:
    """Byte [i, j] holds the weights [i + k · rows / 4, j] in its bits 2k and 2k + 1, each plus one."""
    layer = BitLinear(3, 8, bias=False, invert_weight_scales=inverted)
    ternary = mx.random.randint(-1, 2, (8, 3), key=mx.random.key(0))
    codes = (ternary + 1).astype(mx.uint8)
    layer.weight = codes[:2] | codes[2:4] << 2 | codes[4:6] << 4 | codes[6:] << 6
    layer.weight_scale = mx.array([4.0])
    holder = nn.Sequential(layer)
    dequantize(holder)
    assert type(layer) is nn.Linear
    assert mx.array_equal(layer.weight, ternary * (0.25 if inverted else 4.0))
    x = mx.ones((2, 3))
    assert mx.allclose(holder(x), x @ layer.weight.T)


def test_a_ternary_model_is_dense_and_takes_adapters(tmp_path: Path) -> None:
    config = {**CONFIGURATIONS["bitnet"], **_OWN}
    model = bitnet.Model(bitnet.ModelArgs.from_dict(config))
    for number, layer in enumerate(model.modules()):
        if isinstance(layer, BitLinear):  # of codes 0, 1 and 2
            layer.weight = mx.array([0b00011000, 0b10010001], mx.uint8)[
                mx.random.randint(0, 2, layer.weight.shape, key=mx.random.key(number))
            ]
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    tiny_tokenizer().save_pretrained(tmp_path)
    layout, stored = loaded(tmp_path).adapter_layout, mlx_lm.utils.load_model(tmp_path, lazy=True)[0]
    assert {spec.target for spec in layout} >= {"q_proj", "o_proj", "down_proj"}
    assert shape(adapter_layout(stored)) == shape(layout)
    with pytest.raises(UnsupportedModelError, match="cannot hold an adapter"):
        packed_like(stored.layers[0].mlp.up_proj, nn.Linear(1, 1))
