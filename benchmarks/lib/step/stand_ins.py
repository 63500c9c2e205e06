"""Lets MLX build the graph that it would build on a Mac, on a machine without Metal, and without any memory.

On a CPU, MLX expands its fused kernels (norms, rotary embedding, attention) into many primitives while it builds a
graph, and our own code takes other paths there. While `gpu_graphs` is open, the default device seems to be the GPU,
each fused kernel and each function compiled with `mx.compile` is one `Fused` operation, and nothing is evaluated.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from lib.step.graph import VIEWS, Kind, placeholder, primitives
from mlx.utils import tree_flatten

from mlx_parallm.model.device import prepare_device

_COMPILED = type(nn.silu)
_COMPILED_IN = ("mlx.nn", "mlx_lm.")


@dataclass(frozen=True, slots=True)
class Fused:
    """A call of a fused kernel. Its outputs stand in the graph as placeholders, so the graph ends at its inputs.

    Every call is recorded, even if nothing uses its outputs, or if Metal has no fused kernel for its shape.

    `launches`: kernels that it takes on Metal if no input has to be copied first.
    """

    name: str
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]
    launches: int = 1


@dataclass(slots=True)
class Recorder:
    """The calls of fused kernels, and the arrays that the code wanted evaluated, since the last `clear`."""

    fused: list[Fused] = field(default_factory=list)
    evaluated: list[mx.array] = field(default_factory=list)
    _in_compiled: bool = False

    def clear(self) -> None:
        self.fused.clear()
        self.evaluated.clear()

    def evaluate(self, *trees: Any) -> None:
        self.evaluated += [array for tree in trees for _, array in tree_flatten(tree) if isinstance(array, mx.array)]

    def rms_norm(self, x: mx.array, weight: mx.array | None, _eps: float) -> mx.array:
        return self._one("RMSNorm", (x, weight), x.shape, x.dtype)

    def layer_norm(self, x: mx.array, weight: mx.array | None, bias: mx.array | None, _eps: float) -> mx.array:
        return self._one("LayerNorm", (x, weight, bias), x.shape, x.dtype)

    def rope(self, x: mx.array, *_: Any, offset: Any, freqs: mx.array | None = None, **__: Any) -> mx.array:
        offsets = offset if isinstance(offset, mx.array) else None
        return self._one("RoPE", (x, offsets, freqs), x.shape, x.dtype)

    def attention(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: mx.array | None = None
    ) -> mx.array:
        masks = mask if isinstance(mask, mx.array) else None
        return self._one("ScaledDotProductAttention", (q, k, v, masks, sinks), (*q.shape[:-1], v.shape[-1]), q.dtype)

    def dequantize(
        self,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        group_size: int | None = None,
        bits: int | None = None,
        **_: Any,
    ) -> mx.array:
        shape = (*w.shape[:-1], w.shape[-1] * 32 // (bits or 4))
        return self._one("Dequantize", (w, scales, biases), shape, scales.dtype)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for a function compiled with `mx.compile`: one kernel for each fusion that MLX makes of it."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._in_compiled:
                return function(*arguments, **options)
            shown = [_like(each) if isinstance(each, mx.array) else each for each in arguments]
            self._in_compiled = True
            try:
                results = function(*shown, **options)
            finally:
                self._in_compiled = False
            several = isinstance(results, tuple | list)
            lazy = tuple(results) if several else (results,)
            outputs = tuple(_like(each) for each in lazy)
            inputs = tuple(each for each in arguments if isinstance(each, mx.array))
            kernels = sum(name not in VIEWS for name in primitives(lazy))
            self.fused.append(Fused("Compiled", inputs, outputs, kernels))
            return outputs if several else outputs[0]

        return call

    def _one(self, name: str, inputs: Sequence[mx.array | None], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        output = placeholder(shape, dtype, Kind.OTHER)
        self.fused.append(Fused(name, tuple(each for each in inputs if each is not None), (output,)))
        return output


@contextmanager
def gpu_graphs() -> Iterator[Recorder]:
    """While the block runs, MLX builds graphs as for a Mac's GPU and evaluates nothing."""
    recorder = Recorder()
    in_core = {
        "default_device": lambda: mx.gpu,
        "eval": recorder.evaluate,
        "async_eval": recorder.evaluate,
        "dequantize": recorder.dequantize,
    }
    in_fast = {
        "rms_norm": recorder.rms_norm,
        "layer_norm": recorder.layer_norm,
        "rope": recorder.rope,
        "scaled_dot_product_attention": recorder.attention,
    }
    with ExitStack() as patches:
        patches.callback(prepare_device)  # switches compilation off again on a CPU
        mx.enable_compile()
        for module, name, function in _compiled_functions():
            patches.enter_context(patch.object(module, name, recorder.compiled(function)))
        patches.enter_context(patch.multiple(mx, **in_core))
        patches.enter_context(patch.multiple(mx.fast, **in_fast))
        yield recorder


@contextmanager
def new_arrays_without_memory(kind: Kind) -> Iterator[None]:
    """While the block runs, arrays that are made, and those that grow or shrink, become placeholders of this kind."""

    def replaced(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def make(*arguments: Any, **options: Any) -> mx.array:
            made = function(*arguments, **options)
            return placeholder(made.shape, made.dtype, kind)

        return make

    with patch.multiple(mx, **{name: replaced(getattr(mx, name)) for name in ("zeros", "concatenate", "contiguous")}):
        yield


def _like(array: mx.array) -> mx.array:
    return placeholder(array.shape, array.dtype, Kind.OTHER)


def _compiled_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    modules = [module for name, module in sys.modules.items() if name.startswith(_COMPILED_IN)]
    return [(m, name, value) for m in modules for name, value in vars(m).items() if type(value) is _COMPILED]
