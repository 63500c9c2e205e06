"""What an operation costs on Metal: kernels launched, and bytes read and written.

The rules follow MLX's Metal backend (mlx/backend/metal and mlx/backend/gpu, 0.32). They need the order in memory of
each array, because a kernel that cannot read a view copies it first. Left out: the splitting of products and
reductions with few outputs into two kernels, and caches, so weights that a kernel reads for several rows count once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.step.graph import VIEWS, Kind, Operation, Shaped

_LONG_ATTENTION = 1024
"""Keys from which attention of one query takes two kernels on a large GPU (Max and Ultra)."""
_SORT_BLOCK = 2048
"""Elements that one kernel sorts; longer rows are merged in rounds of two kernels."""
_IN_PLACE = frozenset({"Scatter", "ScatterAxis", "SliceUpdate", "DynamicSliceUpdate"})
_UPDATE_IN_SECOND = frozenset({"SliceUpdate", "DynamicSliceUpdate"})
_SORTS = frozenset({"Sort", "ArgSort", "Partition", "ArgPartition"})
_QUERIES_OF_VECTOR_KERNEL = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of an array in memory: a stride for each dimension, in elements, and the buffer that holds it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    buffer: str
    kind: Kind = Kind.OTHER

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that differ: a broadcast dimension counts once."""
        sides = (side for side, stride in zip(self.shape, self.strides, strict=True) if stride)
        return math.prod(sides) * self.itemsize if 0 not in self.shape else 0

    @property
    def contiguous(self) -> bool:
        return all(
            stride == wanted
            for side, stride, wanted in zip(self.shape, self.strides, _strides(self.shape), strict=True)
            if side > 1
        )


@dataclass(slots=True)
class Cost:
    """Kernels, bytes written, and bytes read of each kind of array."""

    launches: int = 0
    written: int = 0
    read: dict[Kind, int] = field(default_factory=dict)

    def reads(self, layout: Layout, nbytes: int | None = None) -> None:
        self.read[layout.kind] = self.read.get(layout.kind, 0) + (layout.nbytes if nbytes is None else nbytes)

    def copies(self, layout: Layout) -> None:
        """One kernel that copies a view into a new array."""
        self.launches += 1
        self.reads(layout)
        self.written += math.prod(layout.shape) * layout.itemsize

    def add(self, other: "Cost") -> None:
        self.launches += other.launches
        self.written += other.written
        for kind, nbytes in other.read.items():
            self.read[kind] = self.read.get(kind, 0) + nbytes

    @property
    def nbytes(self) -> int:
        return self.written + sum(self.read.values())


def costs(operations: Sequence[Operation]) -> list[Cost]:
    """The cost of each operation, in order. An array that no operation made is contiguous."""
    layouts: dict[str, Layout] = {}
    placed = [_place(operation, layouts) for operation in operations]
    readers: dict[str, int] = {}
    for operation in operations:
        if operation.name not in VIEWS:
            for buffer in {layouts[each.name].buffer for each in operation.inputs}:
                readers[buffer] = readers.get(buffer, 0) + 1
    return [
        moved if operation.name in VIEWS else _cost(operation, layouts, readers)
        for operation, moved in zip(operations, placed, strict=True)
    ]


# ---- where arrays lie --------------------------------------------------------------------------


def _place(operation: Operation, layouts: dict[str, Layout]) -> Cost:
    """Adds the layouts of the operation's outputs. Returns the cost of a view that has to be copied, or nothing."""
    for each in operation.inputs:
        layouts.setdefault(each.name, _new(each))
    cost = Cost()
    source = layouts[operation.inputs[0].name] if operation.inputs else None
    for output in operation.outputs:
        if operation.name == "AsStrided" and not any(operation.arguments[1]):
            layouts[output.name] = _new(output, Kind(operation.arguments[2]))
        elif operation.name in VIEWS and source is not None:
            strides = _view(operation, source, output)
            if strides is None:
                cost.copies(source)
                layouts[output.name] = _new(output)
            else:
                layouts[output.name] = Layout(output.shape, strides, output.itemsize, source.buffer, source.kind)
        else:
            kind = source.kind if source is not None and operation.name in _IN_PLACE else Kind.OTHER
            layouts[output.name] = _new(output, kind)
    return cost


def _view(operation: Operation, source: Layout, output: Shaped) -> tuple[int, ...] | None:
    """The strides of a view; None if the elements have to be copied for it."""
    match operation.name:
        case "Broadcast" | "BroadcastAxes":
            missing = len(output.shape) - len(source.shape)
            kept = zip(source.shape, source.strides, output.shape[missing:], strict=True)
            return (0,) * missing + tuple(stride if side == wanted else 0 for side, stride, wanted in kept)
        case "Transpose":
            return tuple(source.strides[axis] for axis in operation.arguments[0])
        case "Slice":
            return tuple(stride * step for stride, step in zip(source.strides, operation.arguments[2], strict=True))
        case "AsStrided":
            return tuple(operation.arguments[1])
        case "Split" | "Copy" | "Depends" | "StopGradient":
            return source.strides
        case "Contiguous":
            return source.strides if source.contiguous else None
        case "View":
            return source.strides if source.itemsize == output.itemsize else _strides(output.shape)
    return reshaped(source.shape, source.strides, output.shape)


def reshaped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of the same elements in another shape; None if no strides describe them."""
    if 0 in wanted:
        return _strides(wanted)
    runs = _runs(shape, strides)
    result: list[int] = []
    for side in reversed(wanted):
        if side == 1:
            result.append(0)
            continue
        if not runs:
            return None
        length, stride = runs[-1]
        if length % side:
            return None
        result.append(stride)
        runs[-1] = (length // side, stride * side)
        if length == side:
            runs.pop()
    return tuple(reversed(result))


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Joins neighbouring dimensions that one stride can step through. Each is (elements, stride of the innermost)."""
    runs: list[tuple[int, int]] = []
    for side, stride in zip(shape, strides, strict=True):
        if side == 1:
            continue
        if runs and runs[-1][1] == stride * side:
            runs[-1] = (runs[-1][0] * side, stride)
        else:
            runs.append((side, stride))
    return runs


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _new(array: Shaped, kind: Kind = Kind.OTHER) -> Layout:
    return Layout(array.shape, _strides(array.shape), array.itemsize, array.name, kind)


# ---- what kernels cost -------------------------------------------------------------------------


def _cost(operation: Operation, layouts: Mapping[str, Layout], readers: Mapping[str, int]) -> Cost:
    cost = Cost(launches=operation.launches)
    inputs = [layouts[each.name] for each in operation.inputs]
    out = operation.outputs[0]
    if not out.size:
        return Cost()
    if operation.name in _IN_PLACE:
        _update(cost, operation, inputs, readers)
        return cost
    cost.written += sum(each.nbytes for each in operation.outputs)
    match operation.name:
        case "Gather" | "GatherAxis":  # reads what it takes
            cost.reads(inputs[0], out.nbytes)
            for index in inputs[1:]:
                cost.reads(index)
        case "GatherMM" | "GatherQMM":
            _gathered_product(cost, operation, inputs)
        case "Matmul" | "AddMM":
            for matrix in inputs[:2]:
                _matrix(cost, matrix)
            for added in inputs[2:]:
                cost.reads(added)
        case _:
            for layout in inputs:
                cost.reads(layout)
    cost.launches += _more_launches(operation, inputs)
    for layout in _copied_first(operation, inputs):
        cost.copies(layout)
    return cost


def _update(cost: Cost, operation: Operation, inputs: Sequence[Layout], readers: Mapping[str, int]) -> None:
    """Writes a part of an array in place, or of a copy if something else reads the array too."""
    source = inputs[0]
    part = inputs[1] if operation.name in _UPDATE_IN_SECOND else inputs[-1]
    if readers[source.buffer] > 1 or not source.contiguous:
        cost.copies(source)
    for each in inputs[1:]:
        cost.reads(each)
    cost.written += math.prod(part.shape) * part.itemsize


def _gathered_product(cost: Cost, operation: Operation, inputs: Sequence[Layout]) -> None:
    """One product for each pair of indices. A matrix that several pairs name is read once for each of them."""
    out = operation.outputs[0]
    pairs = math.prod(out.shape[:-2])
    indices = 2
    for layout in inputs[:-indices]:
        cost.reads(layout, pairs * math.prod(layout.shape[-2:]) * layout.itemsize)
    for index in inputs[-indices:]:
        cost.reads(index)
    if operation.name == "GatherMM":
        for matrix in inputs[:2]:
            if not _is_matrix(matrix):
                cost.copies(matrix)


def _matrix(cost: Cost, layout: Layout) -> None:
    cost.reads(layout)
    if not _is_matrix(layout):
        cost.copies(layout)


def _is_matrix(layout: Layout) -> bool:
    """Whether a product reads the last two dimensions as they lie: rows or columns without gaps inside them."""
    (rows, columns), (outer, inner) = layout.shape[-2:], layout.strides[-2:]
    return inner == 1 or outer == 1 or columns == 1 or rows == 1


def _more_launches(operation: Operation, inputs: Sequence[Layout]) -> int:
    if operation.name == "Concatenate":
        return len(inputs) - 1
    if operation.name == "Pad":
        return 1
    if operation.name == "ScaledDotProductAttention":
        return int(inputs[0].shape[2] <= _QUERIES_OF_VECTOR_KERNEL and inputs[1].shape[2] >= _LONG_ATTENTION)
    if operation.name in _SORTS:
        blocks = -(-inputs[0].shape[-1] // _SORT_BLOCK)
        return 2 * (blocks - 1).bit_length() + 1 if blocks > 1 else 0
    return 0


def _copied_first(operation: Operation, inputs: Sequence[Layout]) -> list[Layout]:
    """The inputs that the kernel cannot read as they lie."""
    if operation.name == "ScaledDotProductAttention":
        queries, keys, values = inputs[:3]
        if queries.shape[2] > _QUERIES_OF_VECTOR_KERNEL:
            return [each for each in (queries, keys, values) if each.strides[-1] != 1]
        copied = [queries] if not _is_query(queries) else []
        return copied + [each for each in (keys, values) if not _is_cache(each)]
    if operation.name == "QuantizedMatmul" and not inputs[0].contiguous:
        return [inputs[0]]
    return []


def _is_query(layout: Layout) -> bool:
    """Whether attention reads these queries as they lie."""
    if layout.contiguous:
        return True
    batch, heads, _, width = layout.shape
    if batch > 1 and heads > 1:
        return False
    other = 1 if batch == 1 else 0
    return layout.strides[2:] == (width * layout.shape[other], 1) and layout.strides[other] == width


def _is_cache(layout: Layout) -> bool:
    """Whether attention reads these keys or values as they lie."""
    batch, heads = layout.shape[:2]
    if layout.strides[-1] != 1:
        return False
    return batch == 1 or heads == 1 or layout.strides[0] == layout.strides[1] * heads
