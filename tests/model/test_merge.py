import json
import os
from pathlib import Path

import lora
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from family_checks import CONFIGURATIONS, build
from lora import random_adapter
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model
from tiny import save_directory, save_tiny, tiny_config, tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.formats import write_mlx_lm, write_peft
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.errors import AdapterFileError, ConfigError, ModelNotFoundError, UnsupportedModelError
from mlx_parallm.model import merge as merging
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.merge import merge

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])
SCALE = 1.5


def make_adapter(model, folder, write=write_mlx_lm, targets=("q_proj", "down_proj")):
    """Writes a rank-4 adapter of these linears and gives its weights."""
    layout = adapter_layout(model)
    weights = random_adapter(layout, 0, targets=targets, size=1.0, scale=SCALE)
    write(folder, weights, layout, None)
    return weights


def delta(pair):
    product = pair.a.astype(np.float64) @ pair.b.astype(np.float64)
    return mx.array(SCALE * product.swapaxes(-1, -2).astype(np.float32))


def served(model, weights):
    """Logits of the model as a server computes them with the adapter."""
    install_adapters(model, bank := AdapterBank(adapter_layout(model), 1, 4, mx.float32))
    with bank.using(OneAdapter(weights, mx.float32)):
        return model(TOKENS)


def save_quantized(family, path, bits=4, dtype=mx.float32):
    model = tiny_model(family)
    model.set_dtype(dtype)
    model, config = quantize_model(model, tiny_config(family), group_size=32, bits=bits)
    save_directory(model, config, path)
    save_model(path, model)
    save_config(config, path / "config.json")
    return model


def weights_of(model, path):
    module = dict(model.named_modules())[path]
    if not isinstance(module, nn.QuantizedLinear):
        return module.weight
    return mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3_moe"])
def test_a_dense_model_merges_to_base_plus_adapter(family, tmp_path):
    model = save_tiny(family, tmp_path / "base")
    weights = make_adapter(model, tmp_path / "adapter")
    before = model(TOKENS)
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out" / "merged")
    merged, tokenizer = mlx_lm.utils.load(str(tmp_path / "out" / "merged"))
    assert relative_error(merged(TOKENS), lora.merged(model, weights)(TOKENS)) < 1e-5
    assert relative_error(merged(TOKENS), before) > 1e-2
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]


def test_a_peft_adapter_merges_alike(tmp_path):
    model = save_tiny("llama", tmp_path / "base")
    make_adapter(model, tmp_path / "ours")
    make_adapter(model, tmp_path / "theirs", write=write_peft)
    for name in ("ours", "theirs"):
        merge(str(tmp_path / "base"), tmp_path / name, tmp_path / f"{name}-merged")
    ours, theirs = (mlx_lm.utils.load(str(tmp_path / f"{name}-merged"))[0] for name in ("ours", "theirs"))
    assert mx.array_equal(ours(TOKENS), theirs(TOKENS))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_quantized_again_as_it_was(bits, tmp_path):
    """Each weight is rounded to its group's grid: off by half a step, and one more where MLX moves the grid so that
    it holds the group's largest value exactly. Linears that the adapter leaves alone stay bit-identical."""
    base = save_quantized("llama", tmp_path / "base", bits)
    weights = make_adapter(base, tmp_path / "adapter")
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    modules = dict(merged.named_modules())
    for path, pair in weights.pairs.items():
        assert (modules[path].bits, modules[path].group_size) == (bits, 32)
        error = mx.abs(weights_of(merged, path) - (weights_of(base, path) + delta(pair)))
        step = mx.repeat(mx.abs(modules[path].scales), 32, axis=1)
        assert mx.all(error <= 1.5 * step).item()
        assert mx.mean(error / step).item() < 0.3  # of a rounding error that is uniform: 0.25
        assert mx.abs(delta(pair)).mean().item() > 0.01
    untouched = {n: p for n, p in tree_flatten(base.parameters()) if n.rpartition(".")[0] not in weights.pairs}
    stored = dict(tree_flatten(merged.parameters()))
    assert untouched
    assert all(mx.array_equal(stored[name], array) for name, array in untouched.items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_dequantized_output_is_dense_and_exact(family, tmp_path):
    base = save_quantized(family, tmp_path / "base")
    weights = make_adapter(base, tmp_path / "adapter")
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged", dequantize=True)
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    assert {array.dtype for _, array in tree_flatten(merged.parameters())} == {mx.float32}
    want = lora.merged(mlx_lm.utils.dequantize_model(base), weights)
    assert relative_error(merged(TOKENS), want(TOKENS)) < 1e-5


@pytest.mark.parametrize("quantized", [False, True])
def test_the_type_of_the_base_is_kept(quantized, tmp_path):
    """The sum is float32's, rounded once: half a unit in the last of bfloat16's 8 binary places is 2⁻⁸ at most."""
    if quantized:
        model = save_quantized("llama", tmp_path / "base", dtype=mx.bfloat16)
    else:
        model = tiny_model("llama")
        model.set_dtype(mx.bfloat16)
        save_directory(model, tiny_config("llama"), tmp_path / "base")
    weights = make_adapter(model, tmp_path / "adapter")
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    types = {array.dtype for _, array in tree_flatten(merged.parameters())}
    assert types == ({mx.bfloat16, mx.uint32} if quantized else {mx.bfloat16})
    for path, pair in weights.pairs.items() if not quantized else ():
        want = weights_of(model, path).astype(mx.float32) + delta(pair)
        assert mx.all(mx.abs(weights_of(merged, path) - want) <= 2**-8 * mx.abs(want) + 1e-6).item()


def test_biases_and_the_generation_config_are_kept(tmp_path):
    model = save_tiny("qwen2", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"temperature": 0.7}')
    make_adapter(model, tmp_path / "adapter")
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    assert mx.array_equal(merged.layers[0].self_attn.q_proj.bias, model.layers[0].self_attn.q_proj.bias)
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {"temperature": 0.7}


# ---- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", True), ("phi3", True)])
def test_a_head_is_merged_and_a_tied_one_becomes_a_head_of_its_own(family, tied, tmp_path):
    model = save_tiny(family, tmp_path / "base", tie_word_embeddings=tied)
    weights = make_adapter(model, tmp_path / "adapter", targets=("down_proj", "lm_head"))
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert mx.array_equal(merged.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert relative_error(merged(TOKENS), model(TOKENS)) > 1e-2
    assert relative_error(merged(TOKENS), lora.merged(model, weights)(TOKENS)) < 1e-5


def test_a_tied_gemma3_gets_a_head_of_its_own(tmp_path):
    model = tiny_model("gemma3_text")
    del model.lm_head
    model.tie_word_embeddings = True
    save_directory(model, tiny_config("gemma3_text"), tmp_path / "base")
    weights = make_adapter(model, tmp_path / "adapter", targets=("o_proj", "lm_head"))
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    assert not merged.tie_word_embeddings
    assert relative_error(merged(TOKENS), lora.merged(model, weights)(TOKENS)) < 1e-5


@pytest.mark.parametrize("quantized", [False, True])
def test_keys_and_values_of_latent_attention_are_merged_head_by_head(quantized, tmp_path):
    model, config = build("deepseek_v3"), CONFIGURATIONS["deepseek_v3"]
    if quantized:
        model, config = quantize_model(model, config, group_size=32, bits=8)
    save_directory(model, config, tmp_path / "base")
    weights = make_adapter(model, tmp_path / "adapter", write_peft, targets=("kv_b_proj",))
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    before = model(TOKENS)
    logits = served(model, weights)
    assert relative_error(logits, before) > 0.1
    assert relative_error(merged(TOKENS), logits) < (0.1 if quantized else 1e-4)


def test_a_tied_model_without_a_change_of_the_head_stays_tied(tmp_path):
    make_adapter(save_tiny("qwen2", tmp_path / "base"), tmp_path / "adapter")
    merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    assert merged.args.tie_word_embeddings
    assert "lm_head" not in merged


@pytest.mark.parametrize("name", ["gemma2", "internlm2"])
def test_a_model_that_cannot_be_untied_is_refused_and_nothing_is_written(name, tmp_path):
    """mlx-lm's file of internlm2 has another name for the head of an untied model."""
    model, tied = build(name, tie_word_embeddings=True), {"tie_word_embeddings": True}
    save_directory(model, CONFIGURATIONS[name] | tied, tmp_path / "base")
    make_adapter(model, tmp_path / "adapter", targets=("lm_head",))
    with pytest.raises(UnsupportedModelError, match=f"{name} has no head apart from its embedding"):
        merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
def test_the_head_of_the_bundled_model_is_packed_as_its_embedding_is(dequantize, tmp_path):
    model, _, _ = load_bundled(dequantize=False)
    embedding = model.model.embed_tokens.weight
    weights = make_adapter(model, tmp_path / "adapter", targets=("lm_head",))
    merge(None, tmp_path / "adapter", tmp_path / "merged", dequantize=dequantize)
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    assert relative_error(merged(TOKENS), served(model, weights)) < (2e-4 if dequantize else 0.05)
    if dequantize:
        return
    assert (merged.lm_head.bits, merged.lm_head.group_size) == (8, 32)
    assert mx.array_equal(merged.model.embed_tokens.weight, embedding)
    packing = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization"]["lm_head"]
    assert (packing["bits"], packing["group_size"]) == (8, 32)


# ---- what is refused -----------------------------------------------------------------------------


def test_an_existing_output_is_left_alone(tmp_path):
    make_adapter(save_tiny("llama", tmp_path / "base"), tmp_path / "adapter")
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("there", "dangling"):
        with pytest.raises(ConfigError, match="exists: name a directory that does not"):
            merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / name)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    make_adapter(save_tiny("llama", tmp_path / "base"), tmp_path / "adapter")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(AdapterFileError, match=r"adapter_config\.json"):
        merge(str(tmp_path / "base"), tmp_path / "base", tmp_path / "merged")
    with pytest.raises(ModelNotFoundError):
        merge(str(tmp_path / "none"), tmp_path / "adapter", tmp_path / "merged")

    def full_disk(config, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "save_config", full_disk)  # the weights are written by then
    with pytest.raises(OSError, match="No space left"):
        merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == before


def test_the_bundled_model_stays_as_it_is_packed(tmp_path):
    model, _, _ = load_bundled(dequantize=False)
    make_adapter(model, tmp_path / "adapter", targets=("v_proj",))
    merge(None, tmp_path / "adapter", tmp_path / "merged")
    merged, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    packing = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization"]
    assert packing == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert (merged.model.embed_tokens.bits, merged.layers[0].self_attn.v_proj.bits) == (8, 4)
    for name in ("self_attn.q_proj", "self_attn.v_proj"):
        old, new = (dict(m.layers[3].named_modules())[name].weight for m in (model, merged))
        assert mx.array_equal(old, new).item() == (name == "self_attn.q_proj")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
def test_a_disk_that_refuses_the_model_is_told_as_one_and_leaves_nothing(tmp_path, monkeypatch):
    """MLX's own writer raises RuntimeError."""
    save_tiny("llama", tmp_path / "base")
    make_adapter(tiny_model("llama"), tmp_path / "adapter")
    real = merging.save_model

    def full(folder, model):
        (folder / "model.safetensors").symlink_to("/dev/full")
        real(folder, model)

    monkeypatch.setattr(merging, "save_model", full)
    with pytest.raises(OSError, match="Unable to write"):
        merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
