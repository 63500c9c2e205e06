"""`mlx_parallm adapters average`: reads adapters of one base model, and writes their weighted mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_parallm.adapters.average import Average, average
from mlx_parallm.adapters.checkpoints import adapter_in
from mlx_parallm.adapters.files.formats import FormatName
from mlx_parallm.adapters.files.read import read_adapter
from mlx_parallm.adapters.files.write import write_adapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.atomic import new_folder
from mlx_parallm.errors import AdapterFileError, ConfigError
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.linears import adapter_layout
from mlx_parallm.model.loading import load


def write_average(
    model_path: str | None,
    folders: Sequence[Path],
    output: Path,
    form: FormatName,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    check: Callable[[Path, int], None] | None = None,
) -> Average:
    """Writes a new directory with the mean of the adapters in `folders`. The write is atomic.

    Args:
        model_path: the adapters' base model; None means the bundled one.
        form: of the files.
        weights, rank: see `adapters.average.average`.
        check: called with the average's files and the largest rank of all adapters, before `output` is there. If it
            raises, nothing is written.

    Raises:
        ConfigError: `output` exists, or weights or rank do not fit the adapters.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded.
        AdapterFileError: an adapter cannot be read, or is not for this model. The message names its folder.
        Exception: what `check` raises.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    layout = _layout_of(model_path)
    members = [_read(folder, layout) for folder in folders]
    mean = average(members, weights, rank)
    with new_folder(output) as folder:
        write_adapter(folder, form, mean.weights, layout, model_path)
        if check is not None:
            check(folder, max(adapter.rank for adapter in (*members, mean.weights)))
    return mean


def _layout_of(model_path: str | None) -> AdapterLayout:
    prepare_device()
    base = load(model_path, dequantize=False)
    return adapter_layout(base.model, base.source)


def _read(folder: Path, layout: AdapterLayout) -> AdapterWeights:
    try:
        return read_adapter(adapter_in(folder), layout, max_rank=sys.maxsize).weights
    except AdapterFileError as error:
        raise AdapterFileError(f"{folder}: {error}", "lora_path") from error
