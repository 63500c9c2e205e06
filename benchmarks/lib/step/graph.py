"""Reads the graph that MLX would evaluate: its operations, with the shapes and dtypes of their arrays.

MLX's exporter lists the operations with shapes, but merges equal ones first, which evaluation does not do. Its drawing
of a graph has neither shapes nor merging, so the two together give all operations, and the number of repeated ones.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip

VIEWS = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape",
    "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
})  # fmt: skip
"""Primitives that launch no kernel on Metal, unless the result has to be copied to have the wanted order."""


class Kind(IntEnum):
    """What an array in memory holds."""

    OTHER = 0
    WEIGHTS = 1
    HEAD = 2
    KEYS_AND_VALUES = 3
    ADAPTERS = 4


@dataclass(frozen=True, slots=True)
class Shaped:
    """An array of a graph: its name there, shape, and bytes of one element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Operation:
    """One primitive of a graph. `arguments`: its own state, as MLX's exporter gives it.

    `launches`: kernels that it takes on Metal, where that is known beforehand.
    """

    name: str
    inputs: tuple[Shaped, ...]
    outputs: tuple[Shaped, ...]
    arguments: tuple[Any, ...] = ()
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Graph:
    """The operations in the order of evaluation, and the arrays that the function returned."""

    operations: list[Operation]
    outputs: list[Shaped]


def placeholder(shape: Sequence[int], dtype: mx.Dtype, kind: Kind) -> mx.array:
    """An array without memory that is never evaluated. In a graph it is an `AsStrided` whose offset is its kind."""
    return mx.as_strided(mx.array([0], dtype), tuple(shape), [0] * len(shape), int(kind))


def exported(function: Callable[[], list[mx.array]]) -> Graph:
    """The graph of the arrays that `function` returns. Equal operations on the same arrays are merged into one.

    Raises:
        ValueError: a primitive cannot be exported, such as one made by `mx.compile`.
    """
    parts: list[dict[str, Any]] = []
    mx.export_function(parts.append, function)
    outputs = next(part["outputs"] for part in parts if part["type"] == "outputs")
    operations = [
        Operation(part["name"], _shaped(part["inputs"]), _shaped(part["outputs"]), tuple(part["arguments"]))
        for part in parts
        if part["type"] == "primitive"
    ]
    return Graph(operations, list(_shaped(outputs)))


def primitives(outputs: Sequence[mx.array]) -> list[str]:
    """The names of all primitives in a lazy graph, equal ones as often as they will run."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *outputs)
    return re.findall(r'\[label ="(\w+)"', drawing.getvalue())


def _shaped(arrays: Sequence[tuple[str, Sequence[int], mx.Dtype]]) -> tuple[Shaped, ...]:
    return tuple(Shaped(name, tuple(shape), dtype.size) for name, shape, dtype in arrays)
