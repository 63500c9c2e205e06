"""A model called by hand, with one adapter at a time."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from lora import merged, random_adapter
from tiny import save_tiny

from mlx_parallm import SharedModelManager
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.errors import AdapterFileError, UnknownModelError
from mlx_parallm.model.families import relative_error

TOKENS = mx.array([[1, 5, 9, 33], [77, 2, 250, 100]])


@pytest.fixture
def manager(tmp_path: Path) -> SharedModelManager:
    save_tiny("llama", tmp_path / "model")
    return SharedModelManager(tmp_path / "model", progress=False)


def test_experts_routers_and_shared_experts_use_it_too(tmp_path: Path) -> None:
    save_tiny("qwen2_moe", tmp_path / "model")
    manager, plain = (SharedModelManager(tmp_path / "model", progress=False) for _ in range(2))
    tokens = mx.array([[(7 * at) % 256 for at in range(40)]])  # so many that `SwitchGLU` sorts them
    base, adapter = manager.model(tokens), random_adapter(manager.adapter_layout, 1)
    manager.add_lora("math", adapter)
    manager.switch_lora("math")
    assert relative_error(manager.model(tokens), merged(plain.model, adapter)(tokens)) < 1e-5
    assert relative_error(manager.model(tokens), base) > 0.1


@pytest.mark.parametrize("rank", [4, 40])
def test_the_model_uses_the_adapter_that_was_switched_to(
    manager: SharedModelManager, tmp_path: Path, rank: int
) -> None:
    base = manager.model(TOKENS)
    weights = {name: random_adapter(manager.adapter_layout, seed, rank) for seed, name in enumerate(("math", "tone"))}
    for name, adapter in weights.items():
        manager.add_lora(name, adapter)
    for name, adapter in weights.items():
        manager.switch_lora(name)
        expected = merged(SharedModelManager(tmp_path / "model", progress=False).model, adapter)(TOKENS)
        assert relative_error(manager.model(TOKENS), expected) < 1e-5
        assert relative_error(manager.model(TOKENS), base) > 0.1
    manager.switch_lora("base")
    assert relative_error(manager.model(TOKENS), base) < 1e-5


def test_an_adapter_may_be_a_folder(manager: SharedModelManager, tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    weights = random_adapter(manager.adapter_layout, seed=1)
    write_mlx_lm(tmp_path / "math", weights, manager.adapter_layout)
    manager.add_lora("from weights", weights)
    manager.add_lora("from folder", tmp_path / "math")
    outputs = []
    for name in ("from weights", "from folder"):
        manager.switch_lora(name)
        outputs.append(manager.model(TOKENS))
    assert mx.allclose(*outputs, atol=1e-6)
    with pytest.raises(AdapterFileError):
        manager.add_lora("model", tmp_path / "model")


def test_an_unknown_name_is_refused_and_changes_nothing(manager: SharedModelManager) -> None:
    manager.add_lora("math", random_adapter(manager.adapter_layout, seed=1))
    manager.switch_lora("math")
    before = manager.model(TOKENS)
    with pytest.raises(UnknownModelError, match="known: base, math"):
        manager.switch_lora("maths")
    assert mx.array_equal(manager.model(TOKENS), before)
