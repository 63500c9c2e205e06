"""The files of an average: of three adapters in both formats, read again by this package, by mlx-lm and by PEFT's
rules; and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lora import layout_of, merged, random_adapter
from mlx_lm.tuner.utils import load_adapters
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import MLX_LM_WEIGHTS, PEFT_WEIGHTS, FormatName, write_mlx_lm, write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import AdapterFileError, ConfigError, ModelNotFoundError
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.merge import write_average

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])
SHARES = [0.5, 0.3, 0.2]


def write_three(folder: Path, family: str = "llama", **overrides: object) -> tuple[list[AdapterWeights], list[Path]]:
    """A model in `folder`/model, and three adapters of it with different ranks, scales, linears and formats."""
    layout = layout_of(save_tiny(family, folder / "model", **overrides))
    adapters = [
        random_adapter(layout, 1, rank=4, targets=("q_proj", "down_proj", "lm_head"), scale=2.0),
        random_adapter(layout, 2, rank=2, targets=("q_proj", "v_proj"), scale=0.5),
        random_adapter(layout, 3, rank=3, targets=("v_proj", "lm_head"), scale=8.0),
    ]
    folders = [folder / name for name in "abc"]
    write_peft(folders[0], adapters[0], layout, None)
    write_mlx_lm(folders[1], adapters[1], layout)
    write_peft(folders[2], adapters[2], layout, None)
    return adapters, folders


def exact_mean(adapters: list[AdapterWeights]) -> AdapterWeights:
    """The adapters' factors side by side: their mean, by definition."""
    pairs = {}
    for path in {path for adapter in adapters for path in adapter.pairs}:
        members = [
            (s, adapter.pairs[path]) for s, adapter in zip(SHARES, adapters, strict=True) if path in adapter.pairs
        ]
        a = np.concatenate([pair.a for _, pair in members], axis=1)
        b = np.concatenate([share * pair.scale * pair.b for share, pair in members], axis=0)
        pairs[path] = LoRAPair(a, b.astype(np.float32), 1.0)
    return AdapterWeights(pairs)


def product(pair: LoRAPair) -> np.ndarray:
    return pair.scale * pair.a.astype(np.float64) @ pair.b.astype(np.float64)


@pytest.mark.parametrize("form", ["peft", "mlx-lm"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_files_at_full_rank_hold_the_averaged_product(
    form: FormatName, family: str, tied: bool, tmp_path: Path
) -> None:
    adapters, folders = write_three(tmp_path, family, tie_word_embeddings=tied)
    write_average(str(tmp_path / "model"), folders, tmp_path / "mean", form, SHARES)
    got = read_adapter(tmp_path / "mean", layout_of(tiny_model(family, tie_word_embeddings=tied)), 16)
    want = exact_mean(adapters)
    assert (tmp_path / "mean" / {"peft": PEFT_WEIGHTS, "mlx-lm": MLX_LM_WEIGHTS}[form]).is_file()
    assert got.weights.pairs.keys() == want.pairs.keys()
    for path, pair in got.weights.pairs.items():
        reference = product(want.pairs[path])
        assert np.linalg.norm(product(pair) - reference) < 1e-5 * np.linalg.norm(reference)


def test_mlx_lm_loads_the_average(tmp_path: Path) -> None:
    adapters, folders = write_three(tmp_path)
    write_average(str(tmp_path / "model"), folders, tmp_path / "mean", "mlx-lm", SHARES)
    served = load_adapters(tiny_model("llama"), str(tmp_path / "mean"))
    served.eval()
    assert relative_error(served(TOKENS), merged(tiny_model("llama"), exact_mean(adapters))(TOKENS)) < 1e-5
    assert relative_error(served(TOKENS), tiny_model("llama")(TOKENS)) > 1e-2


def test_what_cannot_be_averaged_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    _, (a, b, c) = write_three(tmp_path)
    layout = layout_of(tiny_model("llama", intermediate_size=128))
    write_peft(tmp_path / "other", random_adapter(layout, 1), layout, None)
    before, model = sorted(os.listdir(tmp_path)), str(tmp_path / "model")
    with pytest.raises(AdapterFileError, match=r"/other: .* is it of another base model\?"):
        write_average(model, [a, tmp_path / "other"], tmp_path / "mean", "peft")
    with pytest.raises(AdapterFileError, match=r"/model: .*adapter_config\.json"):
        write_average(model, [a, tmp_path / "model"], tmp_path / "mean", "peft")
    with pytest.raises(AdapterFileError, match=r"/none: "):
        write_average(model, [a, tmp_path / "none"], tmp_path / "mean", "peft")
    with pytest.raises(ConfigError, match="exists: name a directory that does not"):
        write_average(model, [a, b], c, "peft")
    with pytest.raises(ModelNotFoundError):
        write_average(str(tmp_path / "nowhere"), [a, b], tmp_path / "mean", "peft")
    assert sorted(os.listdir(tmp_path)) == before
