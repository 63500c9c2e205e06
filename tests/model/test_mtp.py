"""Prediction heads are kept when a checkpoint is loaded, and give what the published formula says."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest
from heads import head_config, save_files, save_with_head
from tiny import save_tiny

from mlx_parallm.model.loading import load
from mlx_parallm.model.mtp import PredictionHead, load_head
from mlx_parallm.model.split import trunk_of

TOKENS = [(7 + 79 * at) % 250 for at in range(12)]
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe")
WRITTEN_BY_MLX_LM = [("glm4_moe", False), ("glm4_moe_lite", False), ("qwen3_5", False), ("qwen3_5_moe", False)]


def head_in(folder: Path) -> tuple[PredictionHead | None, mx.array]:
    """The head of a directory, and the hidden states of the base model."""
    loaded = load(str(folder), dequantize=True)
    head = load_head(loaded.model, loaded.source, loaded.config)
    return head, trunk_of(loaded.model)(mx.array([TOKENS]))


@pytest.mark.parametrize(("family", "published"), [*((family, True) for family in FAMILIES), *WRITTEN_BY_MLX_LM])
def test_a_head_gives_what_the_formula_says(family: str, published: bool, tmp_path: Path) -> None:
    reference = save_with_head(head_config(family), tmp_path, published=published)
    head, hidden = head_in(tmp_path)
    assert head is not None
    head.input.take(hidden[:, :-1])
    got = head.model(mx.array([TOKENS[1:]]))[0]
    expected = reference.logits(TOKENS)
    assert expected.std().item() > 0.1
    assert mx.abs(got - expected).max().item() < 1e-4


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_a_quantized_head_is_that_of_the_dequantized_weights(family: str, tmp_path: Path) -> None:
    """In mlx-lm's format. What its configuration says of layer 0 is not what the head's only layer has."""
    config = head_config(family)
    save_with_head(config, tmp_path, published=False)
    packed: dict[str, mx.array] = {}
    exact: dict[str, mx.array] = {}
    for name, array in mx.load(str(tmp_path / "model.safetensors")).items():
        packed[name] = exact[name] = array
        if array.ndim > 1 and "conv1d" not in name and not name.endswith("mlp.gate.weight"):
            bits = 8 if ".layers.0.mlp." in name and "mtp." not in name else 4
            parts = mx.quantize(array, group_size=64, bits=bits)
            of_layer = zip(("weight", "scales", "biases"), parts, strict=True)
            packed |= {f"{name.removesuffix('weight')}{part}": each for part, each in of_layer}
            exact[name] = mx.dequantize(*parts, group_size=64, bits=bits)
    start = "language_model.model" if family == "qwen3_5" else "model"
    more = {f"{start}.layers.0.mlp.{name}_proj": {"group_size": 64, "bits": 8} for name in ("gate", "up", "down")}
    found = []
    for folder, weights, extra in (
        ("packed", packed, {"quantization": {"group_size": 64, "bits": 4, **more}}),
        ("exact", exact, {}),
    ):
        save_files(tmp_path / folder, weights, config | extra)
        head, hidden = head_in(tmp_path / folder)
        assert head is not None
        head.input.take(hidden[:, :-1])
        found.append(head.model(mx.array([TOKENS[1:]])))
    assert mx.abs(found[0] - found[1]).max().item() < 1e-3


def test_a_checkpoint_without_a_head_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if its configuration declares one, as of files that mlx-lm has converted. That is logged."""
    save_tiny("qwen3", tmp_path / "without")
    head, _ = head_in(tmp_path / "without")
    assert head is None
    assert not caplog.records
    config = head_config("glm4_moe")
    save_with_head(config, tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    weights = {name: array for name, array in mx.load(str(file)).items() if ".layers.3." not in name}
    save_files(tmp_path / "converted", weights, config)
    with caplog.at_level(logging.INFO):
        head, _ = head_in(tmp_path / "converted")
    assert head is None
    assert "converted is served without a prediction head: its files have no weights of one" in caplog.text


def test_a_head_that_the_configuration_does_not_declare_is_kept_and_one_of_another_kind_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = head_config("qwen3_next")
    del config["mtp_num_hidden_layers"]
    save_with_head(config, tmp_path / "kept")
    assert head_in(tmp_path / "kept")[0] is not None
    weights = mx.load(str(tmp_path / "kept" / "model.safetensors"))
    other = {name.replace("mtp.fc.", "mtp.joined."): array for name, array in weights.items()}
    save_files(tmp_path / "other", other, config)
    with caplog.at_level(logging.INFO):
        assert head_in(tmp_path / "other")[0] is None
    assert "other is served without its prediction head: it is of another kind" in caplog.text
