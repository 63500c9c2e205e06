"""An adapter there and back: mlx-lm's format to PEFT's and to mlx-lm's again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lora import layout_of, random_adapter
from tiny import save_tiny

from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.runs import LOCK
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError
from mlx_parallm.model.merge import convert


def test_there_and_back_to_the_bit(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    layout = layout_of(model)
    weights = random_adapter(layout, seed=1)
    (tmp_path / "first").mkdir()
    write_mlx_lm(tmp_path / "first", weights, layout)
    base = str(tmp_path / "model")
    convert(base, tmp_path / "first", tmp_path / "second", "peft")
    assert {path.name for path in (tmp_path / "second").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    convert(base, tmp_path / "second", tmp_path / "third", "mlx-lm")
    again = read_adapter(tmp_path / "third", layout, 16).weights
    for path, pair in weights.pairs.items():
        assert np.array_equal(pair.a, again.pairs[path].a)
        assert np.array_equal(pair.b, again.pairs[path].b)
    with pytest.raises(ConfigError, match="exists"):
        convert(base, tmp_path / "first", tmp_path / "second", "peft")


def test_a_run_means_its_latest_checkpoint(tmp_path: Path) -> None:
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    store = CheckpointStore(tmp_path / "run", layout, "the base", max_rank=8)
    for step in (1, 2):
        store.save_checkpoint(AdapterRef("default", step), random_adapter(layout, step), step, tags=["one"][step - 1 :])
    (tmp_path / "run" / LOCK).touch()
    for number, (path, seed) in enumerate({"": 2, "default": 2, "default/latest": 2, "default/one": 1}.items()):
        convert(str(tmp_path / "model"), tmp_path / "run" / path, tmp_path / f"out{number}", "peft")
        found = read_adapter(tmp_path / f"out{number}", layout, 16).weights
        for name, pair in random_adapter(layout, seed).pairs.items():
            assert np.array_equal(pair.a, found.pairs[name].a)
