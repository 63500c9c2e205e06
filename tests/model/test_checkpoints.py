"""Checkpoints by name, as a Python program uses them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lora import random_adapter
from tiny import save_tiny

from mlx_parallm import CheckpointManager, SharedModelManager
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError, UnknownModelError

TOKENS = mx.array([[1, 5, 9, 33]])


@pytest.fixture
def manager(tmp_path: Path) -> SharedModelManager:
    save_tiny("llama", tmp_path / "model")
    return SharedModelManager(tmp_path / "model", progress=False)


def same(one: AdapterWeights, other: AdapterWeights) -> bool:
    pairs = [(one.pairs[path], other.pairs[path]) for path in one.pairs]
    return all(np.array_equal(a.a, b.a) and np.allclose(a.scale * a.b, b.scale * b.b) for a, b in pairs)


def test_weights_come_back_by_step_by_tag_and_as_the_latest(manager: SharedModelManager, tmp_path: Path) -> None:
    first, second = (random_adapter(manager.adapter_layout, seed) for seed in (1, 2))
    checkpoints = CheckpointManager(tmp_path / "model", tmp_path / "kept")
    assert checkpoints.save_checkpoint("checkpoint-500", first).name == "checkpoint-500"
    assert checkpoints.save_checkpoint("best", second).name == "checkpoint-501"
    assert checkpoints.names() == ("checkpoint-500", "checkpoint-501", "best", "latest")
    again = CheckpointManager(manager, tmp_path / "kept")
    assert same(again.load_checkpoint("checkpoint-500"), first)
    assert same(again.load_checkpoint("best"), second)
    assert same(again.load_checkpoint(), second)


def test_hot_swap_makes_the_model_use_a_checkpoint(manager: SharedModelManager, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(manager, tmp_path / "kept")
    base = manager.model(TOKENS)
    for seed in (1, 2):
        checkpoints.save_checkpoint(f"checkpoint-{seed}", random_adapter(manager.adapter_layout, seed))
    outputs = []
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-1"):
        checkpoints.hot_swap(manager, name)
        outputs.append(manager.model(TOKENS))
    assert mx.array_equal(outputs[0], outputs[2])
    assert mx.abs(outputs[0] - outputs[1]).max() > 0.1
    with pytest.raises(UnknownModelError):
        checkpoints.hot_swap(manager, "checkpoint-3")
    assert mx.array_equal(manager.model(TOKENS), outputs[2])
    manager.switch_lora("base")
    assert mx.array_equal(manager.model(TOKENS), base)


def test_what_cannot_be_saved_or_loaded_is_refused(manager: SharedModelManager, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(manager, tmp_path / "kept")
    first, second = (random_adapter(manager.adapter_layout, seed) for seed in (1, 2))
    checkpoints.save_checkpoint("checkpoint-1", first)
    with pytest.raises(ConflictError):
        checkpoints.save_checkpoint("checkpoint-1", second)
    with pytest.raises(InvalidRequestError):
        checkpoints.save_checkpoint("../elsewhere", second)
    save_tiny("llama", tmp_path / "other", seed=1)
    with pytest.raises(AdapterFileError, match="base model"):
        CheckpointManager(tmp_path / "other", tmp_path / "kept").load_checkpoint("checkpoint-1")
