"""Layers with quantized weights as dense ones: their weights are dequantized, in any packing of MLX and mlx-lm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.bitlinear_layers import BitLinear

from mlx_parallm.errors import UnsupportedModelError

_PACKED_ARRAYS = ("scales", "biases", "global_scale", "weight_scale")
_PACKING = ("group_size", "bits", "mode")


def dequantize(model: nn.Module) -> None:
    """Makes every quantized layer a dense one, in place and lazily. Activations are not quantized then either.

    A layer of which there is no dense kind stays as it is.
    """
    for layer in model.modules():
        if (kind := _dense_kind(layer)) is not None:
            weight = dense_weight(layer)
            for name in _PACKED_ARRAYS:
                layer.pop(name, None)
            for name in _PACKING:
                vars(layer).pop(name, None)
            layer.__class__ = kind
            layer.weight = weight


def to_float32(model: nn.Module) -> None:
    """Dequantizes quantized layers and widens all others to float32, in place and lazily."""
    _widen_all(model)  # scales too: with 16-bit scales, the dequantized weights would be rounded to 16 bits
    dequantize(model)
    _widen_all(model)


def _widen_all(model: nn.Module) -> None:
    model.update(tree_map(_widen, model.parameters()))


def _widen(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


@contextmanager
def as_dense(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model's quantized layers are dense, so that passes which are not computed can be built
    on a device without kernels for them."""
    packed = [(layer, type(layer), dict(layer), dict(vars(layer))) for layer in model.modules() if _dense_kind(layer)]
    dequantize(model)
    try:
        yield
    finally:
        for layer, kind, arrays, settings in packed:
            layer.__class__ = kind
            dict.clear(layer)
            dict.update(layer, arrays)
            vars(layer).clear()
            vars(layer).update(settings)


def dense_weight(layer: nn.Module) -> mx.array:
    """The weight of a linear or an embedding, [out, in], or of several at once, [experts or heads, out, in].

    A dequantized one has the type of its scales; if they are 8-bit, bfloat16, or float32 with a global scale.
    """
    if isinstance(layer, BitLinear):
        return _ternary_weight(layer)
    if "scales" not in layer:
        return cast(mx.array, layer.weight)
    packing = {name: getattr(layer, name) for name in _PACKING if hasattr(layer, name)}
    of_each = layer.get("global_scale")
    if of_each is None:
        return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **packing)
    experts = zip(layer.weight, layer.scales, of_each, strict=True)
    return mx.stack([mx.dequantize(w, s, global_scale=scale, **packing) for w, s, scale in experts])


def packed_like(layer: nn.Module, dense: nn.Module) -> nn.Module:
    """A dense linear, quantized as `layer` is; itself if `layer` is dense.

    Raises:
        UnsupportedModelError: MLX cannot quantize in this way.
    """
    if isinstance(layer, BitLinear):
        raise UnsupportedModelError("weights of -1, 0 and 1 cannot hold an adapter: serve it, or merge it dequantized")
    if "scales" not in layer:
        return dense
    options = {name: getattr(layer, name) for name in _PACKING}
    if "global_scale" in layer:
        options["global_scale"] = True
    if isinstance(layer, nn.QQLinear):
        options["quantize_input"] = True
    return dense.eval().to_quantized(**options)


def _dense_kind(layer: nn.Module) -> Any:
    """The class of layers like this one with a dense weight; None if it is dense, or there is no such class.

    MLX and mlx-lm call the quantized kind of SwitchLinear QuantizedSwitchLinear, and have both in one module.
    """
    if isinstance(layer, BitLinear):
        return nn.Linear
    if "scales" not in layer:
        return None
    name = type(layer).__name__.replace("Quantized", "").replace("QQ", "")
    kind = getattr(sys.modules[type(layer).__module__], name, None) or getattr(nn, name, None)
    return kind if kind is not type(layer) else None


def _ternary_weight(layer: BitLinear) -> mx.array:
    """Of weights -1, 0 and 1 with one scale. Byte i holds the rows i, i + rows / 4, …, in two bits each from the
    lowest on."""
    rows = mx.concatenate([(layer.weight >> shift) & 3 for shift in (0, 2, 4, 6)])[: layer.out_features]
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    return cast(mx.array, (rows.astype(scale.dtype) - 1) * scale)
