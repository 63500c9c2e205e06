"""Files of cached prefixes: the arrays of the block, or the one error after which the file is removed."""

import hashlib

import mlx.core as mx
import numpy as np
from fuzz.mutation import safetensors_with

from mlx_parallm.kv.disk import BlockFileError, decode, shapes
from mlx_parallm.model.layer_state import KVLayout, LayerSpec

SHAPES = shapes(KVLayout((LayerSpec(1, 1, 1), LayerSpec(1, 1, 1, window=100)), mx.bfloat16))
IDS = tuple(range(64))
mutated = safetensors_with([*SHAPES, "ids", "__metadata__"])


def run(data):
    """`data`: the file without its checksum, with which it is read too."""
    for file in (data, data + hashlib.sha256(data).digest()):
        try:
            arrays = decode(file, IDS, SHAPES)
        except BlockFileError:
            continue
        assert [array.shape for array in arrays] == list(SHAPES.values())
        assert all(array.dtype == np.uint8 for array in arrays)
