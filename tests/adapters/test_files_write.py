"""Writing adapters: they read back as they were, and mlx-lm's own code agrees with ours."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from adapter_folders import (
    DOWN0,
    HIDDEN,
    LAYERS,
    LAYOUT,
    Q0,
    Q1,
    V0,
    V1,
    VOCABULARY,
    make_layout,
    peft_folder,
    peft_tensors,
    random_weights,
    read,
    refusal,
)
from lora import merged, random_adapter
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from safetensors import safe_open
from tiny import tiny_model

from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_mlx_lm, write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, lora_scale
from mlx_parallm.errors import AdapterFileError
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])
FILES = {"adapters.safetensors": "mlx", "adapter_model.safetensors": "pt"}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for path, pair in want.items():
        assert np.array_equal(got[path].a, pair.a)
        assert np.array_equal(got[path].b, pair.b)
        assert got[path].scale == pytest.approx(pair.scale, rel=1e-15)


def delta(pair):
    return pair.scale * (pair.a.astype(np.float64) @ pair.b.astype(np.float64))


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_mlx_lm_round_trip_is_bit_exact(tmp_path):
    weights = random_weights({Q0: 4, DOWN0: 4, V1: 4}, 1.7)
    write_mlx_lm(tmp_path, weights, LAYOUT)
    assert_equal(read(tmp_path).weights.pairs, weights.pairs)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_peft_round_trip_is_bit_exact_with_any_ranks_and_scales(prefix, tmp_path):
    layout = make_layout(prefix)
    paths = list(layout.linears)
    ranks = dict(zip(paths, (4, 4, 3, 4, 7, 1), strict=True))
    scales = dict(zip(paths, (2.0, 2.0, 0.3, -1.5, 2.0, 64.0), strict=True))
    weights = random_weights(ranks, scales, layout=layout)
    write_peft(tmp_path, weights, layout, "org/model")
    assert_equal(read(tmp_path, layout).weights.pairs, weights.pairs)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_a_head_is_written_as_each_program_spells_it(prefix, tmp_path):
    layout = make_layout(prefix)
    weights = random_weights({next(iter(layout.linears)): 4, layout.head.path: 2}, layout=layout)
    write_peft(tmp_path / "peft", weights, layout, None)
    write_mlx_lm(tmp_path / "mlx-lm", weights, layout)
    assert_equal(read(tmp_path / "peft", layout).weights.pairs, weights.pairs)
    assert list(read(tmp_path / "mlx-lm", layout).weights.pairs) == list(weights.pairs)
    assert "lm_head" in config_of(tmp_path / "peft")["target_modules"]
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "np") as file:
        assert file.get_tensor("base_model.model.lm_head.lora_A.weight").shape == (2, HIDDEN)
        assert file.get_tensor("base_model.model.lm_head.lora_B.weight").shape == (VOCABULARY, 2)
    assert layout.head.path in config_of(tmp_path / "mlx-lm")["lora_parameters"]["keys"]


@pytest.mark.parametrize("write", [write_mlx_lm, lambda *arguments: write_peft(*arguments, None)])
@pytest.mark.parametrize("rank", [3, 4, 8])
def test_a_rank_stabilised_adapter_stays_one(write, rank, tmp_path):
    """Its alpha is written as it was configured, and its scale is alpha / √rank."""
    scale = lora_scale(32.0, rank, rslora=True)
    weights = replace(random_weights({Q0: rank, V1: rank}, scale), rslora=True)
    assert (scale, weights.alpha) == (pytest.approx(32 / rank**0.5), 32.0)
    write(tmp_path, weights, LAYOUT)
    got = read(tmp_path).weights
    assert_equal(got.pairs, weights.pairs)
    assert (got.rslora, got.alpha) == (True, 32.0)
    config = config_of(tmp_path)
    if "peft_type" in config:
        assert (config["use_rslora"], config["lora_alpha"]) == (True, 32)


@pytest.mark.parametrize("write", [write_mlx_lm, lambda *arguments: write_peft(*arguments, None)])
def test_half_precision_is_stored_as_it_is(write, tmp_path):
    pairs = random_weights({Q0: 4}).pairs
    half = {path: LoRAPair(np.float16(p.a), np.float16(p.b), p.scale) for path, p in pairs.items()}
    write(tmp_path, AdapterWeights(half), LAYOUT)
    assert_equal(read(tmp_path).weights.pairs, half)
    assert read(tmp_path).info.nbytes == AdapterWeights(half).nbytes


def test_mlx_lm_pads_ranks_and_folds_scales(tmp_path):
    weights = random_weights({Q0: 2, V0: 5, Q1: 3}, {Q0: 0.25, V0: 3.0, Q1: -6.0})
    write_mlx_lm(tmp_path, weights, LAYOUT)
    got = read(tmp_path).weights.pairs
    assert {(pair.rank, pair.scale) for pair in got.values()} == {(5, -6.0)}
    for path, pair in weights.pairs.items():
        assert np.allclose(delta(got[path]), delta(pair), rtol=1e-6, atol=1e-6)
    assert np.array_equal(got[Q1].b[:3], weights.pairs[Q1].b)  # its scale is the file's: nothing was folded


def test_what_the_configs_say(tmp_path):
    weights = random_weights({Q1: 4, V1: 8, V0: 8}, {Q1: 2.0, V1: 2.0, V0: 0.3})
    write_mlx_lm(tmp_path / "m", weights, LAYOUT, {"step": 7, "num_layers": 99})
    assert config_of(tmp_path / "m") == {
        "step": 7,
        "fine_tune_type": "lora",
        "num_layers": LAYERS,
        "lora_parameters": {
            "rank": 8,
            "scale": 2.0,
            "dropout": 0.0,
            "keys": ["self_attn.q_proj", "self_attn.v_proj"],
        },
    }
    write_mlx_lm(tmp_path / "last", random_weights({Q1: 4}), LAYOUT)
    assert config_of(tmp_path / "last")["num_layers"] == 1  # mlx-lm counts from the end
    write_peft(tmp_path / "p", weights, LAYOUT, "org/model")
    config = config_of(tmp_path / "p")
    assert (config["peft_type"], config["task_type"], config["base_model_name_or_path"]) == (
        "LORA",
        "CAUSAL_LM",
        "org/model",
    )
    assert (config["r"], config["rank_pattern"]) == (8, {Q1: 4})
    assert config["lora_alpha"] / config["r"] == pytest.approx(1.0)
    assert config["alpha_pattern"] == {V1: 16, V0: pytest.approx(2.4)}
    assert config["target_modules"] == [Q1, "v_proj"]  # not layer 0's q_proj


def test_metadata_says_whose_format_it_is(tmp_path):
    write_mlx_lm(tmp_path, random_weights({Q0: 4}), LAYOUT)
    write_peft(tmp_path, random_weights({Q0: 4}), LAYOUT, None)
    for name, framework in FILES.items():
        with safe_open(tmp_path / name, "np") as file:
            assert file.metadata() == {"format": framework}


# ---- with mlx-lm -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize(
    "targets", [{"q_proj", "v_proj", "qkv_proj", "gate_up_proj", "down_proj", "o_proj"}, {"o_proj", "lm_head"}]
)
def test_mlx_lm_loads_what_we_write_and_computes_the_same(family, targets, tmp_path):
    model = tiny_model(family)
    layout = adapter_layout(model)
    odd = random_adapter(layout, 1, rank=3, targets=targets, scale=2.0).pairs
    weights = AdapterWeights(random_adapter(layout, 0, rank=2, targets=targets).pairs | dict([*odd.items()][::2]))
    assert ("lm_head" in targets) == (layout.head.path in weights.pairs)
    write_mlx_lm(tmp_path, weights, layout)
    want = merged(tiny_model(family), weights)(TOKENS)
    got = load_adapters(model, str(tmp_path))
    got.eval()
    assert relative_error(got(TOKENS), want) < 1e-5
    assert relative_error(tiny_model(family)(TOKENS), want) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_mlx_lm_writes_reads_back_equal(family, dtype, tmp_path):
    model = tiny_model(family)
    layout = adapter_layout(model)
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)
    trained = [(n, mx.random.normal(p.shape).astype(dtype)) for n, p in tree_flatten(model.trainable_parameters())]
    assert trained
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(trained))
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters, "iters": 1000, "seed": 0}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    pairs = read_adapter(tmp_path, layout, max_rank=8).weights.pairs

    assert len(pairs) == 2
    assert {path.rpartition(".")[2] for path in pairs} == {"q_proj", "v_proj"}
    for name, array in trained:
        path, _, factor = name.rpartition(".")
        got = pairs[path].a if factor == "lora_a" else pairs[path].b
        assert mx.array_equal(mx.array(got), array.astype(mx.float32))
        assert pairs[path].scale == 20.0


def test_factors_of_experts_that_mlx_lm_writes_read_back_equal(tmp_path):
    model = tiny_model("qwen3_moe")
    layout = adapter_layout(model)
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": ["mlp.switch_mlp.up_proj", "mlp.gate"]}
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)
    trained = {n: mx.random.normal(p.shape) for n, p in tree_flatten(model.trainable_parameters())}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), trained)
    pairs = read_adapter(tmp_path, layout, max_rank=8).weights.pairs
    up = "model.layers.1.mlp.switch_mlp.up_proj"
    assert set(pairs) == {up, "model.layers.1.mlp.gate"}
    assert mx.array_equal(mx.array(pairs[up].a), trained[f"{up}.lora_a"].swapaxes(1, 2))
    assert mx.array_equal(mx.array(pairs[up].b), trained[f"{up}.lora_b"].swapaxes(1, 2))


@pytest.mark.parametrize(
    ("shape", "words"), [((3, 8, 64), "has 4 experts"), ((8, 64), "has 4 experts"), ((4, 8, 60), "maps 64 to 32")]
)
def test_factors_of_other_experts_are_refused(shape, words, tmp_path):
    up, layout = "model.layers.1.mlp.switch_mlp.up_proj", adapter_layout(tiny_model("qwen3_moe"))
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 8, "scale": 20.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{up}.lora_a": mx.zeros(shape), f"{up}.lora_b": mx.zeros((4, 32, 8))}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    with pytest.raises(AdapterFileError, match=words):
        read_adapter(tmp_path, layout, max_rank=8)


def test_experts_are_refused_in_pefts_format(tmp_path):
    layout = adapter_layout(tiny_model("qwen3_moe"))
    with pytest.raises(AdapterFileError, match="expert LoRA cannot be written"):
        write_peft(tmp_path, random_adapter(layout, 0, targets=("down_proj",)), layout, None)


@pytest.mark.parametrize("path", ["switch_mlp.up_proj", "experts.3.up_proj"])
def test_experts_of_pefts_format_are_refused_by_name(path, tmp_path):
    tensors = peft_tensors(path=f"model.layers.1.mlp.{path}", shape=(64, 32))
    message = refusal(peft_folder(tmp_path, tensors), layout=adapter_layout(tiny_model("qwen3_moe")))
    assert f"expert LoRA in another format than mlx-lm's is not supported: model.layers.1.mlp.{path}" in message
