"""Rewrites an adapter in another program's format: mlx-lm's, or PEFT's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlx_parallm.adapters.atomic import new_folder
from mlx_parallm.adapters.files import read_adapter, write_mlx_lm, write_peft
from mlx_parallm.errors import ConfigError
from mlx_parallm.model.adapted import adapter_layout
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.families import classify
from mlx_parallm.model.loading import find_model, load_directory

PEFT = "peft"


def convert(model_path: str | None, adapter: Path, output: Path, form: str) -> None:
    """Writes an adapter of the model (None: the bundled one) as a new directory, whole or not at all.

    Args:
        form: `peft`, which names `model_path` as its base; anything else: mlx-lm's.

    Raises:
        ConfigError: `output` exists.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded.
        AdapterFileError: the adapter cannot be read, or is of another model.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    prepare_device()
    source = None if model_path is None else find_model(model_path, progress=True)
    model = load_bundled(dequantize=False)[0] if source is None else load_directory(source, False, False)[0]
    layout = adapter_layout(model, classify(model))
    weights = read_adapter(adapter, layout, max_rank=sys.maxsize).weights
    with new_folder(output) as folder:
        if form == PEFT:
            write_peft(folder, weights, layout, model_path)
        else:
            write_mlx_lm(folder, weights, layout)
