"""Kernels of the package on the CPU: their text, compiled by the C++ compiler of this machine.

`HostKernel` is called as what `mx.fast.metal_kernel` returns is. What a GPU's compiler makes of the text, how it rounds
half-precision, and how fast it is, this cannot tell.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.batch.paged_attention import source_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to compile the kernels with")

_TYPES = {mx.float32: "float", mx.float16: "_Float16", mx.bfloat16: "shim::bfloat16"}
_NUMBERS = ("DK", "DV", "KV", "G", "M", "SPAN", "SIMDS", "CHUNKS", "SPLIT", "SINKS")
_ARGUMENTS = {
    "attend": {
        "queries": "T", "keys": "T", "values": "T", "blocks": "int32_t", "parts": "int32_t", "starts": "int32_t",
        "settings": "int32_t", "scale": "float", "sinks": "float", "outputs": "O", "sums": "float",
    },
    "merge": {"pieces": "float", "sums": "float", "owners": "int32_t", "sinks": "float", "outputs": "O"},
}  # fmt: skip


class KernelError(Exception):
    """What the shim has found."""


class HostKernel:
    """A kernel of the package, whose threads run in an order that `seed` decides. `replaced`: a text, and what stands
    there instead, to break the kernel on purpose."""

    def __init__(self, name: str, seed: int = 0, replaced: tuple[str, str] | None = None) -> None:
        self._name, self._seed = name, seed
        self._library = _compiled(name, replaced)

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Raises KernelError: an index is beyond an array, or the threads of a group do not go the same way."""
        values = dict(template)
        *inputs, sinks = inputs
        held = [_bytes(each) for each in [*inputs, sinks.astype(mx.float32)]]
        sizes = [each.size for each in [*inputs, sinks]]
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            nothing = mx.full(shape, float("nan"), dtype)
            held.append(_bytes(nothing))
            sizes.append(nothing.size)
        numbers = [int(values.get(name, 0)) for name in _NUMBERS]
        error = ctypes.create_string_buffer(300)
        run = getattr(self._library, f"run_{_code(values.get('T', mx.float32))}_{_code(values['O'])}")
        groups = [side // size for side, size in zip(grid, threadgroup, strict=True)]
        assert all(side % size == 0 for side, size in zip(grid, threadgroup, strict=True)), "a group that is not whole"
        run(
            (ctypes.c_int * len(numbers))(*numbers),
            (ctypes.c_void_p * len(held))(*(each.ctypes.data for each in held)),
            (ctypes.c_int64 * len(sizes))(*sizes),
            groups[0], groups[1], threadgroup[0], self._seed, error,
        )  # fmt: skip
        if error.value:
            raise KernelError(error.value.decode())
        made = held[-len(output_shapes) :]
        return [
            mx.array(each).view(dtype).reshape(shape)
            for each, shape, dtype in zip(made, output_shapes, output_dtypes, strict=True)
        ]


def _bytes(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


def _code(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


@cache
def _compiled(name: str, replaced: tuple[str, str] | None) -> ctypes.CDLL:
    """The kernel as a library, with a function for each pair of types."""
    text = source_of(name)
    if replaced is not None:
        assert text.count(replaced[0]) == 1, f"{replaced[0]!r} is not in the kernel once"
        text = text.replace(*replaced)
    text = re.sub(
        r"THREADGROUP float (\w+)\[([^;]*)\];", r'auto \1 = shim::threadgroup_array(\2, __LINE__, "\1");', text
    )
    folder = _new_folder()
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(_program(name, text))
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
    built = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:3000]
    return ctypes.CDLL(str(library))


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mlx_parallm-kernel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _program(name: str, text: str) -> str:
    """The kernel's text as a C++ function, and one that runs it for each pair of types."""
    arrays = "\n".join(
        f'  shim::Array<{kind}> {argument}{{({kind}*)call.data[{at}], call.sizes[{at}], "{argument}"}};'
        for at, (argument, kind) in enumerate(_ARGUMENTS[name].items())
    )
    numbers = "\n".join(f"  const int {number} = call.numbers[{at}];" for at, number in enumerate(_NUMBERS))
    if name == "attend":
        pairs = [(dtype, output) for dtype in _TYPES for output in {dtype, mx.float32}]
    else:
        pairs = [(mx.float32, output) for output in _TYPES]
    functions = "\n".join(_function(*pair) for pair in pairs)
    return f"""#include "gpu_shim.h"
#define BLOCK {BLOCK_TOKENS}
#define LOWEST -3.0e38f
struct Call {{ const int* numbers; void** data; const int64_t* sizes; }};
template <class T, class O> void kernel(void* arguments) {{
  const Call& call = *(Call*)arguments;
{numbers}
{arrays}
  const int group_x = shim::group.x, group_y = shim::group.y;
  const int lane = shim::group.current % 32, simd = shim::group.current / 32;
{text}
}}
{functions}
"""


def _function(dtype: mx.Dtype, output: mx.Dtype) -> str:
    return f"""
extern "C" void run_{_code(dtype)}_{_code(output)}(
    const int* numbers, void** data, const int64_t* sizes, int x, int y, int threads, int seed, char* error) {{
  Call call{{numbers, data, sizes}};
  auto body = kernel<{_TYPES[dtype]}, {_TYPES[output]}>;
  std::snprintf(error, 300, "%s", shim::run(x, y, threads, seed, body, &call).c_str());
}}"""
