"""An adapter written for other programs, and opened by what reads it there: mlx-lm's loader and the reader of `gguf`.

`tests/clients/test_peft.py` has PEFT, and `benchmarks/studies/exports.py` llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from family_checks import CONFIGURATIONS, build
from lora import layout_of, merged, random_adapter
from tiny import save_directory, save_tiny, tiny_config, tiny_model

from benchmarks.studies.exports import FAMILIES
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_mlx_lm, write_peft
from mlx_parallm.adapters.runs import LOCK, named_adapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair
from mlx_parallm.cli.main import main
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.extras.gguf import ARCHITECTURES
from mlx_parallm.model.bundled import _to_mlx_lm
from mlx_parallm.model.merge import export_adapter
from mlx_parallm.optional_packages import Extra
from mlx_parallm.rl.runs.record import RunFile

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])
NEAR = 1e-5


def log_probabilities(model: nn.Module) -> mx.array:
    return nn.log_softmax(model(TOKENS).astype(mx.float32))


def apart(one: nn.Module, other: nn.Module) -> float:
    return mx.abs(log_probabilities(one) - log_probabilities(other)).max().item()


def uneven(layout: AdapterLayout, rslora: bool = False) -> AdapterWeights:
    """Ranks and scales that differ from one linear to the next."""
    pairs = {}
    for number, (path, pair) in enumerate(random_adapter(layout, seed=3, rank=6).pairs.items()):
        rank = 2 + number % 5
        pairs[path] = LoRAPair(pair.a[..., :rank], pair.b[..., :rank, :], 2.0 - 0.25 * (number % 3))
    return AdapterWeights(pairs, rslora)


def test_there_and_back_to_the_bit(tmp_path: Path) -> None:
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    weights = random_adapter(layout, seed=1)
    write_mlx_lm(tmp_path / "first", weights, layout)
    base = str(tmp_path / "model")
    export_adapter(base, tmp_path / "first", tmp_path / "second", "peft", "org/model")
    files = {path.name for path in (tmp_path / "second").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/model"
    export_adapter(base, tmp_path / "second", tmp_path / "third", "mlx-lm")
    again = read_adapter(tmp_path / "third", layout, 16).weights
    for path, pair in weights.pairs.items():
        assert np.array_equal(pair.a, again.pairs[path].a)
        assert np.array_equal(pair.b, again.pairs[path].b)
    with pytest.raises(ConfigError, match="exists"):
        export_adapter(base, tmp_path / "first", tmp_path / "second", "peft")


def test_a_run_means_its_latest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    store = CheckpointStore(tmp_path / "runs" / "words", layout, "the base", max_rank=8)
    for step in (1, 2):
        store.save_checkpoint(AdapterRef("default", step), random_adapter(layout, step), step, tags=["one"][step - 1 :])
    (tmp_path / "runs" / "words" / LOCK).touch()
    RunFile(tmp_path / "runs" / "words", "id", {"model": {"base_model_path": "model"}}, {}, {})
    steps = {"runs/words": 2, "words": 2, "words/default": 2, "words/default/latest": 2, "words/default/one": 1}
    for text, step in steps.items():
        assert named_adapter(text).resolve() == tmp_path / "runs" / "words" / "default" / f"checkpoint-{step}"
    assert named_adapter("none") == Path("none")
    assert main(["adapters", "export", "words", "--to", "peft", "--out", "out"]) == 0  # its base is in run.json
    found = read_adapter(tmp_path / "out", layout, 16).weights
    for name, pair in random_adapter(layout, 2).pairs.items():
        assert np.array_equal(pair.a, found.pairs[name].a)


# -- opened by others ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_mlx_lm_computes_the_same(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path / "model")
    weights = uneven(layout_of(model), rslora=True)
    write_mlx_lm(tmp_path / "adapter", weights, layout_of(model))
    base = str(tmp_path / "model")
    export_adapter(base, tmp_path / "adapter", tmp_path / "out", "mlx-lm")
    theirs, _ = mlx_lm.load(base, adapter_path=str(tmp_path / "out"))
    before = log_probabilities(model)
    ours = merged(model, weights)
    assert apart(ours, theirs) < NEAR
    assert mx.abs(log_probabilities(ours) - before).max().item() > 0.1


def read_gguf(file: Path) -> tuple[gguf.GGUFReader, dict[str, mx.array]]:
    """The file, and what it adds to the weights of llama.cpp's model, by the weight's name without `.weight`."""
    reader = gguf.GGUFReader(file)
    alpha = reader.fields["adapter.lora.alpha"].contents()
    factors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    deltas = {}
    for name in {name.rpartition(".")[0] for name in factors}:
        a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        deltas[name] = mx.array(alpha / b.shape[-1] * (b.astype(np.float64) @ a).astype(np.float32))
    return reader, deltas


def with_deltas(model: nn.Module, deltas: Mapping[str, mx.array]) -> nn.Module:
    modules = dict(model.named_modules())
    for name, delta in deltas.items():
        weight = modules[name.removesuffix(".weight")].weight
        modules[name.removesuffix(".weight")].weight = weight + delta
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_the_reader_of_gguf_finds_what_llama_cpp_is_to_add(rslora: bool, tmp_path: Path) -> None:
    """The bundled model is a file of llama.cpp, so what reads it undoes the order of the rows of q and k."""
    config = tiny_config("llama")
    weights = uneven(layout_of(model := save_tiny("llama", tmp_path / "model")), rslora)
    write_peft(tmp_path / "adapter", weights, layout_of(model), None)
    export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "out", "gguf")
    reader, deltas = read_gguf(tmp_path / "out" / "adapter.gguf")
    names = ("general.type", "general.architecture", "adapter.type")
    assert [reader.fields[name].contents() for name in names] == ["adapter", "llama", "lora"]
    assert len(deltas) == len(weights.pairs)
    ours = _to_mlx_lm(deltas, config["num_attention_heads"], config["num_key_value_heads"])
    assert apart(merged(tiny_model("llama"), weights), with_deltas(model, ours)) < NEAR


@pytest.mark.parametrize("bits", [16, 32])
def test_experts_have_a_matrix_each_in_gguf(bits: int, tmp_path: Path) -> None:
    layout = layout_of(save_tiny("qwen3_moe", tmp_path / "model"))
    weights = random_adapter(layout, seed=1)
    if bits == 16:  # of bfloat16, which float32 holds
        kept = {
            path: replace(pair, a=np.array(mx.array(pair.a).astype(mx.bfloat16).astype(mx.float32)))
            for path, pair in weights.pairs.items()
        }
        weights = AdapterWeights(kept)
    write_mlx_lm(tmp_path / "adapter", weights, layout)
    export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "out", "gguf")
    _, deltas = read_gguf(tmp_path / "out" / "adapter.gguf")
    pair = weights.pairs["model.layers.1.mlp.switch_mlp.down_proj"]
    want = pair.scale * (pair.a @ pair.b).swapaxes(-1, -2)
    assert np.allclose(deltas["blk.1.ffn_down_exps.weight"], want, atol=1e-6)


def test_the_text_part_of_a_model_has_the_names_of_a_model_of_text(tmp_path: Path) -> None:
    """llama.cpp has the other part in a file of its own."""
    names = []
    for family in ("gemma3", "gemma3_text"):
        layout = layout_of(save_tiny(family, tmp_path / family))
        write_mlx_lm(tmp_path / f"{family}-adapter", random_adapter(layout, seed=1), layout)
        export_adapter(str(tmp_path / family), tmp_path / f"{family}-adapter", tmp_path / f"{family}-out", "gguf")
        names.append(set(read_gguf(tmp_path / f"{family}-out" / "adapter.gguf")[1]))
    assert names[0] == names[1]
    assert "blk.3.attn_q.weight" in names[0]


def test_an_adapter_of_scale_zero_stays_one(tmp_path: Path) -> None:
    """llama.cpp takes alpha 0 for none."""
    layout = layout_of(save_tiny("qwen2", tmp_path / "model"))
    write_mlx_lm(tmp_path / "adapter", random_adapter(layout, seed=1, scale=1.0), layout)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 0.0
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "out", "gguf")
    reader, deltas = read_gguf(tmp_path / "out" / "adapter.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() != 0
    assert not any(mx.any(delta).item() for delta in deltas.values())


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "targets", "words"), [
    ("deepseek_v3", ("o_proj",), "adapters of deepseek_v3"),
    ("qwen2", ("lm_head",), "a tied head"),
])  # fmt: skip
def test_what_gguf_has_no_place_for_is_refused(
    family: str, targets: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    model = build(family) if family in CONFIGURATIONS else tiny_model(family)
    save_directory(model, CONFIGURATIONS.get(family) or tiny_config(family), tmp_path / "model")
    write_mlx_lm(tmp_path / "adapter", random_adapter(layout_of(model), 0, targets=targets), layout_of(model))
    with pytest.raises(UnsupportedModelError, match=f"{words}.*--to fused --dequantize"):
        export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "out", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_the_package_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    write_mlx_lm(tmp_path / "adapter", random_adapter(layout, 0), layout)
    monkeypatch.setattr("mlx_parallm.extras.gguf.GGUF", Extra("no_such_module", "gguf", "gguf"))
    with pytest.raises(ConfigError, match=r"--to gguf: gguf is not installed; .*mlx-parallm\[gguf\]"):
        export_adapter(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "out", "gguf")


def test_every_architecture_is_one_of_llama_cpp_and_was_tried_there() -> None:
    assert set(ARCHITECTURES.values()) <= set(gguf.MODEL_ARCH_NAMES.values())
    assert ARCHITECTURES.keys() - FAMILIES.keys() == {"gemma3"}  # with a part for images


@pytest.mark.parametrize(("fault", "status", "words"), [
    (OSError(28, "No space left on device"), 1, "out was not written: No space left on device"),
    (KeyboardInterrupt(), 130, ""),
])  # fmt: skip
def test_a_full_disk_or_ctrl_c_leaves_nothing(
    fault: BaseException, status: int, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    write_mlx_lm(tmp_path / "adapter", random_adapter(layout, 0), layout)

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    arguments = [str(tmp_path / "adapter"), "--model-path", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert main(["adapters", "export", "--to", "gguf", *arguments]) == status
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]
