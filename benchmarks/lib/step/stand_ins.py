"""Lets MLX build the graph that it would build on a Mac, on a machine without Metal, and without any memory.

On a CPU, MLX expands its fused kernels (norms, rotary embedding, attention) into many primitives while it builds a
graph, and our own code takes other paths there. While `gpu_graphs` is open, the default device seems to be the GPU,
each fused kernel and each function compiled with `mx.compile` is one `Fused` operation, and nothing is evaluated.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta

from benchmarks.lib.step.graph import VIEWS, Kind, exported, placeholder, primitives
from benchmarks.lib.step.metal import costs
from mlx_parallm.batch import paged_attention
from mlx_parallm.model.device import prepare_device

_eval = mx.eval
_COMPILED = type(nn.silu)
_COMPILED_IN = ("mlx.nn", "mlx_lm.", "mlx_parallm.")


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


class _Launched:
    """Arrays in flight."""

    def __init__(self, arrays: list[mx.array]) -> None:
        self.ids = set(map(id, arrays))
        self._arrays = arrays
        self._is_cut = False

    def cut(self) -> None:
        if not self._is_cut:
            make_zeros(self._arrays)
            self._is_cut = True


@dataclass(slots=True)
class Recorder:
    """What happened since the last `clear`.

    fused: the calls of fused kernels
    evaluated: the arrays that the code wanted evaluated
    waits: the calls that wait for the device
    ahead: the launches while an earlier one was in flight. What they write in place is copied as a whole first, if the
        earlier one reads it.
    """

    fused: list[Fused] = field(default_factory=list)
    evaluated: list[mx.array] = field(default_factory=list)
    waits: int = 0
    ahead: int = 0
    _in_flight: list[_Launched] = field(default_factory=list)
    _in_compiled: bool = False
    _counted: dict[Any, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.fused.clear()
        self.evaluated.clear()
        self.waits = self.ahead = 0

    def want(self, *trees: Any) -> list[mx.array]:
        """Notes that the arrays are to be computed, with the graphs that they have now."""
        arrays = [array for _, array in tree_flatten(trees) if isinstance(array, mx.array)]
        self.evaluated += map(copy, arrays)
        return arrays

    def cut(self) -> None:
        """Makes computed arrays of those in flight, so that the next graph does not contain theirs."""
        for launched in self._in_flight:
            launched.cut()

    def launch(self, *trees: Any) -> None:
        """Stands for `mx.async_eval`."""
        self.ahead += bool(self._in_flight)
        self._in_flight.append(_Launched(self.want(*trees)))

    def evaluate(self, *trees: Any) -> None:
        """Stands for `mx.eval`, which waits for the launch that computes one of the arrays, and for those before it."""
        wanted = set(map(id, self.want(*trees)))
        while any(wanted & launched.ids for launched in self._in_flight):
            self._in_flight.pop(0).cut()
        self.waits += 1

    def synchronize(self, *_: Any) -> None:
        """Stands for `mx.synchronize`."""
        while self._in_flight:
            self._in_flight.pop(0).cut()
        self.waits += 1

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

    def paged_attention(self, name: str, _inputs: Sequence[str], _outputs: Sequence[str]) -> Callable[..., Any]:
        """Stands for the kernels of `paged_attention`. They read of keys and values the blocks of their parts."""

        def call(*, inputs: Sequence[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            read = list(inputs)
            if name == "attend":
                blocks = int(np.array(inputs[4])[4::6].sum())
                read[1:3] = (array[:, :blocks] for array in inputs[1:3])
            outputs = [
                placeholder(shape, dtype, Kind.OTHER) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            self.fused.append(Fused(f"Paged {name}", tuple(read), tuple(outputs)))
            return outputs

        return call

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

    def contiguous(self, x: mx.array, **_: Any) -> mx.array:
        """As if a copy were always needed. MLX cannot export this primitive."""
        return self._one("Contiguous", (x,), x.shape, x.dtype)

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: Any = None
    ) -> tuple[mx.array, mx.array]:
        """Stands for mlx-lm's kernel for Metal."""
        outputs = (placeholder(v.shape, q.dtype, Kind.OTHER), _like(state))
        masks = () if mask is None else (mask,)
        self.fused.append(Fused("GatedDelta", (q, k, v, g, beta, state, *masks), outputs))
        return outputs

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for a function compiled with `mx.compile`: one kernel for each fusion that MLX makes of it, and
        those of every product, norm and sort, which are not fused. Its bytes are those of its arguments and results."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._in_compiled:
                return function(*arguments, **options)
            shown = [_like(each) if isinstance(each, mx.array) else each for each in arguments]
            self._in_compiled = True
            try:
                results = function(*shown, **options)
                kernels = self._kernels(function, shown, options, results)
            finally:
                self._in_compiled = False
            outputs = tuple(map(_like, _several(results)))
            inputs = tuple(each for each in arguments if isinstance(each, mx.array))
            self.fused.append(Fused("Compiled", inputs, outputs, kernels))
            return outputs if isinstance(results, tuple | list) else outputs[0]

        return call

    def _kernels(self, function: Any, arguments: list[Any], options: Any, results: Any) -> int:
        shapes = tuple((each.shape, each.dtype) if isinstance(each, mx.array) else each for each in arguments)
        key = (function, shapes, tuple(options.items()))
        if key not in self._counted:
            kernels = sum(name not in VIEWS for name in primitives(_several(results)))
            self._counted[key] = kernels + _more_kernels(lambda: function(*arguments, **options))
        return self._counted[key]

    def _one(self, name: str, inputs: Sequence[mx.array | None], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        arrays = [each for each in inputs if each is not None]
        output = placeholder(shape, dtype, Kind.OTHER)
        if self._in_compiled:  # an operation that MLX does not fuse with others, and that needs the same arrays
            return mx.cumsum(mx.depends([output], arrays)[0], -1)
        self.fused.append(Fused(name, tuple(arrays), (output,)))
        return output


class Unrecorded(Recorder):
    """Puts one cheap primitive in the place of each fused kernel, so that the time to build a graph can be measured."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def want(self, *trees: Any) -> list[mx.array]:
        return [array for _, array in tree_flatten(trees) if isinstance(array, mx.array)]

    def paged_attention(self, *_: Any) -> Callable[..., Any]:
        return lambda *, inputs, output_shapes, output_dtypes, **_: [
            mx.stop_gradient(inputs[0]) if inputs[0].shape == tuple(shape) else placeholder(shape, dtype, Kind.OTHER)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]

    def gated_delta(self, *arrays: Any) -> tuple[mx.array, mx.array]:
        return mx.stop_gradient(arrays[2]), mx.stop_gradient(arrays[5])

    def _one(self, name: str, inputs: Sequence[mx.array | None], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        first = inputs[0]
        assert first is not None
        return mx.stop_gradient(first) if first.shape == tuple(shape) else placeholder(shape, dtype, Kind.OTHER)


@contextmanager
def gpu_graphs(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """While the block runs, MLX builds graphs as for a Mac's GPU and evaluates nothing."""
    recorder, compile_function = recorder or Recorder(), mx.compile
    in_core = {
        "compile": lambda function, **options: recorder.compiled(compile_function(function, **options)),
        "default_device": lambda: mx.gpu,
        "eval": recorder.evaluate,
        "async_eval": recorder.launch,
        "synchronize": recorder.synchronize,
        "dequantize": recorder.dequantize,
        "contiguous": recorder.contiguous,
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
        patches.enter_context(patch.object(mx.metal, "is_available", lambda: True))
        patches.enter_context(patch.object(paged_attention, "kernel", recorder.paged_attention))
        patches.enter_context(patch.object(gated_delta, "gated_delta_kernel", recorder.gated_delta))
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


def make_zeros(arrays: Iterable[mx.array]) -> None:
    """Makes computed arrays, all zeros, of lazy ones, wherever they are held. Offsets and lengths are computed."""
    for array in arrays:
        if array.dtype != mx.int32:
            array[...] = _like(array)
        _eval(array)


def _several(results: Any) -> tuple[mx.array, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _more_kernels(function: Callable[[], Any]) -> int:
    """The kernels of operations of a compiled function that take more than one each, such as long sorts."""
    mx.disable_compile()
    try:
        operations = exported(lambda: list(_several(function()))).operations
    finally:
        mx.enable_compile()
    launched = zip(operations, costs(operations), strict=True)
    return sum(max(0, cost.launches - (operation.name not in VIEWS)) for operation, cost in launched)


def _like(array: mx.array) -> mx.array:
    return placeholder(array.shape, array.dtype, Kind.OTHER)


def _compiled_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    modules = [module for name, module in sys.modules.items() if name.startswith(_COMPILED_IN)]
    return [(m, name, value) for m in modules for name, value in vars(m).items() if type(value) is _COMPILED]
