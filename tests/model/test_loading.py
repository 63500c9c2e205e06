"""A base model's fingerprint follows its files' names and content, and nothing else; a check takes its first layers."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from tiny import tiny_model

from mlx_parallm.model.loading import fingerprint_files, keep_few_layers, model_files

MIB = 1 << 20
LARGE = 24 * MIB


def model(folder: Path, weights: bytes = b"weights", config: bytes = b"{}") -> list[Path]:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(config)
    return model_files(folder)


def test_same_files_elsewhere_and_in_any_order_are_the_same_model(tmp_path: Path) -> None:
    here, there = model(tmp_path / "a"), model(tmp_path / "b")
    assert fingerprint_files(here) == fingerprint_files(reversed(there))
    assert re.fullmatch("[0-9a-f]{32}", fingerprint_files(here))


def test_names_sizes_and_content_count(tmp_path: Path) -> None:
    variants = [
        model(tmp_path / "plain"),
        model(tmp_path / "content", weights=b"weighty"),
        model(tmp_path / "longer", weights=b"weights\0"),
        model(tmp_path / "config", config=b"[]"),
        model(tmp_path / "moved", weights=b"weight", config=b"s{}"),
        [(tmp_path / "plain" / "model.safetensors").rename(tmp_path / "model-2.safetensors")],
    ]
    prints = [fingerprint_files(files) for files in variants[1:]] + [fingerprint_files(model(tmp_path / "plain"))]
    assert len(set(prints)) == len(variants)


def test_every_byte_counts_up_to_eight_mib(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8 * MIB))
    seen = {fingerprint_files([path])}
    for at in (0, MIB, 3 * MIB + 12345, 8 * MIB - 1):
        data = bytearray(8 * MIB)
        data[at] = 1
        path.write_bytes(data)
        seen.add(fingerprint_files([path]))
    assert len(seen) == 5


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(LARGE))
    return path


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1000))
def test_a_changed_stretch_of_a_large_file_is_seen_wherever_it_lies(large: Path, place: int) -> None:
    """Between two of the 62 blocks there are at most (LARGE - 2 MiB) / 61 bytes."""
    stretch = (LARGE - 2 * MIB) // 61
    start = (LARGE - stretch) * place // 1000
    before = fingerprint_files([large])
    with large.open("r+b") as file:
        file.seek(start)
        file.write(b"\1" * stretch)
        file.flush()
        assert fingerprint_files([large]) != before
        file.seek(start)
        file.write(bytes(stretch))
    assert fingerprint_files([large]) == before


@pytest.mark.parametrize("at", [0, MIB - 1, LARGE - MIB, LARGE - 1])
def test_every_byte_of_a_large_files_ends_counts(large: Path, at: int) -> None:
    before = fingerprint_files([large])
    with large.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    assert fingerprint_files([large]) != before


def test_one_layer_more_than_there_are_kinds_is_kept() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    first = model.layers[:2]
    assert keep_few_layers(model) == (2, 6)
    assert model.layers == first
    assert model(mx.array([[1, 2]]), cache=make_prompt_cache(model)).shape[:2] == (1, 2)
    hybrid = tiny_model("qwen3_next")
    kinds = {type(layer.linear_attn if layer.is_linear else layer.self_attn) for layer in hybrid.layers}
    keep_few_layers(hybrid)
    assert {type(layer.linear_attn if layer.is_linear else layer.self_attn) for layer in hybrid.layers} == kinds


def test_a_model_that_does_not_run_with_fewer_layers_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    kind = type(model.model)
    monkeypatch.setattr(kind, "__call__", lambda self, *_args, **_kwargs: self.layers[5](self.embed_tokens(_args[0])))
    layers = list(model.layers)
    assert keep_few_layers(model) == (6, 6)
    assert model.layers == layers
