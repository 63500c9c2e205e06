"""Copies of the base model's embedding and head beside an adapter's factors, as PEFT saves them with
`save_embedding_layers`. One that equals the base model's weight changes nothing."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.files.disk import ITEM_BYTES, Float32, TensorInfo, problem, widened
from mlx_parallm.adapters.weights import AdapterLayout, plain_path
from mlx_parallm.errors import shown

_ROUNDING = 2.0**-8
"""The largest relative difference of a number that was rounded to bfloat16."""
_ROWS = 4096
_ADVICE = "save the adapter without it (save_embedding_layers=False)"


def check_copy(name: str, path: str, info: TensorInfo, values: Float32, layout: AdapterLayout) -> None:
    """Checks that the tensor `name`, a copy of the weight of the module at `path`, is that of the base model. It may be
    of another type, and rounded.

    Raises:
        AdapterFileError: it differs, or the base model's files do not have the weight as it was trained.
    """
    what = f"{shown(name)} is a copy of the {'head' if path.endswith('lm_head') else 'embedding'}"
    base = _base_weight(path, layout.source)
    if base is None:
        raise problem(f"{what}, which cannot be compared with this base model's: that is quantized; {_ADVICE}")
    dtype, weight = base
    rounding = 0.0 if dtype == info.dtype else _ROUNDING
    rows = range(0, len(weight), _ROWS)
    if weight.shape != values.shape or not all(
        np.allclose(values[at : at + _ROWS], weight[at : at + _ROWS], rtol=rounding, atol=1e-6 * bool(rounding))
        for at in rows
    ):
        raise problem(f"{what} that differs from this base model's, so it was trained or resized; {_ADVICE}")


def _base_weight(path: str, folder: Path | None) -> tuple[str, Float32] | None:
    """Type and values of a module's weight in the files of the base model. A tied model's head is its embedding."""
    if folder is None or not folder.is_dir():
        return None
    files = sorted(folder.glob("*.safetensors"))
    names = [f"{each}.weight" for each in (path, path.replace("lm_head", "model.embed_tokens"))]
    for name in names:
        for file in files:
            with suppress(OSError, ValueError, struct.error):  # it is gone, or no safetensors file
                if (found := _tensor_in(file, plain_path(name))) is not None:
                    return found
    return None


def _tensor_in(file: Path, plain: str) -> tuple[str, Float32] | None:
    """Type and values of the tensor with this plain path, if a file has it as floats."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        tensors = json.loads(opened.read(length))
        floats = (name for name, tensor in tensors.items() if tensor.get("dtype") in ITEM_BYTES)
        name = next((name for name in floats if plain_path(name) == plain), None)
        if name is None:
            return None
        info = TensorInfo(tensors[name]["dtype"], tuple(tensors[name]["shape"]))
        opened.seek(8 + length + tensors[name]["data_offsets"][0])
        return info.dtype, widened(name, info, bytearray(opened.read(info.nbytes)))
