"""An adapter there and back: mlx-lm's format to PEFT's and to mlx-lm's again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lora import layout_of, random_adapter
from tiny import save_tiny

from mlx_parallm.adapters.files.read import read_adapter
from mlx_parallm.adapters.files.write import write_mlx_lm
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
