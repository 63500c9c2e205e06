"""The memory that the backward pass of a layer takes, found from the graph that MLX would run, without running it.

A layer is a unit (see `recomputation`). The graph of its gradient is built lazily and exported; then the arrays are
followed in MLX's order of evaluation: what an operation makes is in memory until its last use. Weights and what the
unit gets are not counted.

    x ──┬─ ... ─▶ unit within it ─▶ ... ─▶ outputs
        └─ ... ◀─ its gradients  ◀─ ... ◀─ gradients of the outputs

Units within a unit are nodes of its graph: their outputs and their gradients are given to it, and what they take
themselves is added where they stand. MLX frees an array some operations after its last use, because it runs ahead of
the device. That is not counted; see `JobMemory`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mlx_parallm.train.recomputation import Unit, watched_by

T = TypeVar("T")

_VIEWS = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
})  # fmt: skip
"""Primitives whose outputs are in the memory of their inputs."""

_DISORDERS = frozenset({"AsStrided", "Broadcast", "BroadcastAxes", "Slice", "Split", "Transpose"})
"""Views after which the numbers may not lie one after the other. To give them another shape they are copied."""

_TAKES_NO_INPUT = frozenset({
    "AddMM", "ArgPartition", "ArgReduce", "ArgSort", "Concatenate", "Convolution", "Gather", "GatherAxis", "GatherMM",
    "GatherQMM", "LayerNormVJP", "LogSumExp", "Matmul", "Pad", "Partition", "QuantizedMatmul", "Reduce", "RMSNormVJP",
    "RoPE", "ScaledDotProductAttention", "Sort",
})  # fmt: skip
"""Primitives whose outputs never take over the memory of an input; others do, if nothing else needs it."""


def _like(array: mx.array, *_: object, **__: object) -> mx.array:
    return array * 1


def _product(x: mx.array, factors: mx.array, *_: object, rhs_indices: mx.array, **__: object) -> mx.array:
    rows = mx.broadcast_shapes(x.shape[:-2], rhs_indices.shape)
    return mx.broadcast_to(x, (*rows, *x.shape[-2:])) @ factors[0]


_NOT_EXPORTED = ((mx, "contiguous", _like), (mx.distributed, "all_sum", _like), (mx, "gather_mm", _product))
"""Functions that MLX cannot export, or not their gradients, and others that take as much memory."""

_WIDTH = 20
"""MLX evaluates a graph breadth first as long as no more than so many arrays wait, and depth first beyond that."""

_IN_FLIGHT = 5
"""Operations after which the device has read its inputs."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes that a unit takes, beside what it gets and the gradients of that.

    outputs: of its outputs. forward: the most beside these while they are computed.
    kept: all arrays that its gradients need, with the outputs, if it is not computed again. after: the most beside
        these while its gradients are computed.
    again: the most while it is computed again for its gradients.
    inner: what the units within it take, in their order.
    """

    outputs: int
    forward: int
    kept: int
    after: int
    again: int
    inner: tuple[UnitMemory, ...] = ()


Outputs = list[mx.array]
Found = dict[object, UnitMemory]
"""What units take, by their shapes."""


class _Array(NamedTuple):
    """An array of a graph, by its name there."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Operation:
    """A primitive, or a unit. `within`: the most bytes that it takes beside its outputs while it runs."""

    primitive: str
    inputs: Sequence[_Array]
    outputs: Sequence[_Array]
    within: int = 0


def units_in(
    function: Callable[[], T], given: Iterator[mx.array] | None = None
) -> tuple[T, list[tuple[Unit, Outputs]]]:
    """What a function gives, and the units that it calls, with their outputs. Nothing is computed. `given`: arrays that
    take the place of these outputs."""
    units: list[tuple[Unit, Outputs]] = []

    def watch(unit: Unit) -> Outputs:
        outputs, _ = units_in(lambda: unit.function(*unit.arrays))
        if given is not None:
            outputs = list(islice(given, len(outputs)))
        units.append((unit, outputs))
        return outputs

    with watched_by(watch):
        return function(), units


def unit_memory(unit: Unit, found: Found, inside: object = None) -> UnitMemory:
    """What a unit takes whose gradient is derived. The units within it cut the graph: their outputs are arguments, and
    their arrays are results.

    Args:
        found: see `Found`; what it lacks is added.
        inside: what the memory of the units within it depends on beside their shapes.

    Raises:
        ValueError: a primitive cannot be exported.
    """
    outputs, inner = units_in(lambda: unit.function(*unit.arrays))
    count = len(unit.arrays)
    given = [array for _, arrays in inner for array in arrays]
    taken = [array for each, _ in inner for array in each.arrays]

    def gradients(*arguments: mx.array) -> list[mx.array]:
        primals, upstream = _cut(arguments, count + len(given))

        def function(*arrays: mx.array) -> list[mx.array]:
            made, units = units_in(lambda: unit.function(*arrays[:count]), iter(arrays[count:]))
            return [*made, *(array for each, _ in units for array in each.arrays)]

        made, slopes = mx.vjp(function, list(primals), list(upstream))
        return [made[0], *made[len(outputs) :], *slopes]

    graph = _exported(gradients, [*unit.arrays, *given, *outputs, *taken])
    _, of_given, _, downstream = _cut(graph.arguments, count, len(given), len(outputs))
    made, of_taken, slopes, upstream = _cut(graph.results, 1, len(taken), count)
    rest = [iter(each) for each in (of_given, upstream, of_taken, downstream)]
    operations, memories = (
        list(graph.operations),
        [_inner_memory(each, arrays, found, inside) for each, arrays in inner],
    )
    for (each, arrays), memory in zip(inner, memories, strict=True):
        outs, ups = (list(islice(names, len(arrays))) for names in rest[:2])
        ins, downs = (list(islice(names, len(each.arrays))) for names in rest[2:])
        operations.append(_Operation("unit", ins, outs, memory.forward))
        operations.append(_Operation("gradients of a unit", [*ins, *ups], downs, memory.again))
    ((again, _),) = _peaks(operations, [slopes])
    (forward, kept), (most, _) = _peaks(operations, [made, slopes])
    size = _nbytes(outputs)
    return UnitMemory(size, max(0, forward - size), kept, most - kept, again, tuple(memories))


def _inner_memory(unit: Unit, outputs: Outputs, found: Found, inside: object) -> UnitMemory:
    key = (inside, _shapes(unit.arrays), _shapes(outputs))
    if key not in found:
        found[key] = unit_memory(unit, found) if unit.gradient is None else _given(unit, outputs, unit.gradient)
    return found[key]


def _given(unit: Unit, outputs: Outputs, gradient: Callable[..., Sequence[mx.array]]) -> UnitMemory:
    """What a unit takes that has a gradient of its own."""
    forward = _exported(unit.function, unit.arrays)
    count = len(unit.arrays)
    backward = _exported(lambda *each: list(gradient(each[:count], each[count:])), [*unit.arrays, *outputs])
    first, again = (_peaks(each.operations, [each.results])[0][0] for each in (forward, backward))
    size = _nbytes(outputs)
    return UnitMemory(size, first, size, again, again)


def _cut(values: Iterable[T], *lengths: int) -> list[list[T]]:
    """Parts of these lengths, and the rest."""
    rest = iter(values)
    return [*(list(islice(rest, length)) for length in lengths), list(rest)]


def _nbytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _shapes(arrays: Sequence[mx.array]) -> tuple[object, ...]:
    return tuple((array.shape, array.dtype.size) for array in arrays)


# -- graphs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Graph:
    operations: list[_Operation] = field(default_factory=list)
    arguments: list[_Array] = field(default_factory=list)
    results: list[_Array] = field(default_factory=list)


def _exported(function: Callable[..., list[mx.array]], like: Sequence[mx.array]) -> _Graph:
    """The graph of a function of arrays like these. Raises ValueError: a primitive cannot be exported."""
    graph = _Graph()

    def add(part: Mapping[str, Any]) -> None:
        if part["type"] == "inputs":
            graph.arguments.extend(_arrays(part["inputs"]))
        elif part["type"] == "outputs":
            graph.results.extend(_arrays(part["outputs"]))
        elif part["type"] == "primitive":
            graph.operations.append(_Operation(part["name"], _arrays(part["inputs"]), _arrays(part["outputs"])))

    with _exportable():
        mx.export_function(add, function, *(mx.zeros(array.shape, array.dtype) for array in like))
    return graph


def _arrays(shaped: Iterable[tuple[str, Sequence[int], mx.Dtype]]) -> list[_Array]:
    return [_Array(name, math.prod(shape) * dtype.size) for name, shape, dtype in shaped]


@contextmanager
def _exportable() -> Iterator[None]:
    """While the block runs, functions that MLX cannot export make their arrays by another primitive, for all: only the
    device thread may call this."""
    originals = [getattr(module, name) for module, name, _ in _NOT_EXPORTED]
    try:
        for module, name, other in _NOT_EXPORTED:
            setattr(module, name, other)
        yield
    finally:
        for (module, name, _), original in zip(_NOT_EXPORTED, originals, strict=True):
            setattr(module, name, original)


# -- memory --------------------------------------------------------------------------------------


def _peaks(operations: Sequence[_Operation], stages: Sequence[Sequence[_Array]]) -> list[tuple[int, int]]:
    """Evaluates the arrays of one stage after the other. Returns for each the most bytes that are in memory meanwhile,
    and those that are after it. The arrays of the last stage are not counted."""
    maker = {array.name: at for at, each in enumerate(operations) for array in each.outputs}
    orders: list[list[int]] = []
    for results in stages:
        orders.append(_order(operations, maker, [maker[array.name] for array in results if array.name in maker]))
        for at in orders[-1]:
            for array in operations[at].outputs:
                del maker[array.name]
    uses = Counter(name for order in orders for at in order for name in _inputs(operations[at]))
    memory = _Memory(uses, frozenset(array.name for array in stages[-1]))
    for results in stages:
        memory.uses.update(array.name for array in results)
    peaks = []
    for order in orders:
        memory.most = memory.held
        for at in order:
            memory.run(operations[at])
        memory.wait()
        peaks.append((memory.most, memory.held))
    return peaks


def _order(operations: Sequence[_Operation], maker: Mapping[str, int], roots: Sequence[int]) -> list[int]:
    """The order in which MLX evaluates what these operations need: that of its `eval_impl`, from the last one back."""

    def needs(at: int) -> list[int]:
        return [maker[array.name] for array in operations[at].inputs if array.name in maker]

    inputs = {-1: list(roots)}
    stack = [-1]
    uses: Counter[int] = Counter()
    while stack:
        for at in inputs[stack.pop()]:
            uses[at] += 1
            if at not in inputs:
                inputs[at] = needs(at)
                stack.append(at)
    tape, waiting, place = [-1], list[tuple[int, int]](), 0
    while place < len(tape) or waiting:
        if place < len(tape):
            at, first = tape[place], 0
            place += 1
        else:
            at, first = waiting.pop()
        for number in range(first, len(inputs[at])):
            if len(tape) - place >= _WIDTH:
                waiting.append((at, number))
                break
            needed = inputs[at][number]
            uses[needed] -= 1
            if not uses[needed]:
                tape.append(needed)
    return tape[:0:-1]


def _inputs(operation: _Operation) -> set[str]:
    return {array.name for array in operation.inputs}


class _Memory:
    """What is in memory. `uses`: how often each array is still needed. `uncounted`: arrays that take nothing. `held`:
    bytes now. `most`: at one time."""

    def __init__(self, uses: Counter[str], uncounted: frozenset[str]) -> None:
        self.uses = uses
        self._uncounted = uncounted
        self.held = self.most = 0
        self._buffer: dict[str, int] = {}
        self._nbytes: list[int] = []
        self._holders: defaultdict[int, int] = defaultdict(int)
        self._disordered: set[str] = set()
        self._in_flight: list[list[int]] = []

    def run(self, operation: _Operation) -> None:
        inputs = _inputs(operation)
        if len(self._in_flight) >= _IN_FLIGHT:
            self._read(self._in_flight.pop(0))
        for number, array in enumerate(operation.outputs):
            buffer = self._place(operation, number, array)
            self._buffer[array.name] = buffer
            self._holders[buffer] += 1
        self.most = max(self.most, self.held + operation.within)
        read = [self._buffer[name] for name in inputs if name in self._buffer]
        for buffer in read:
            self._holders[buffer] += 1
        self._in_flight.append(read)
        for name in inputs:
            self.uses[name] -= 1
            self._drop(name)
        for array in operation.outputs:
            self._drop(array.name)

    def wait(self) -> None:
        """Until the device has read everything."""
        while self._in_flight:
            self._read(self._in_flight.pop())

    def _place(self, operation: _Operation, number: int, array: _Array) -> int:
        """The buffer of an output: that of an input, or a new one."""
        inputs = operation.inputs
        if array.name in self._uncounted:
            return -1
        if operation.primitive in _VIEWS:
            source = inputs[number if operation.primitive == "Depends" else 0]
            reshapes = operation.primitive in ("Flatten", "Reshape")
            if not (reshapes and source.name in self._disordered):
                if operation.primitive in _DISORDERS or source.name in self._disordered:
                    self._disordered.add(array.name)
                return self._buffer.get(source.name, -1)
        elif operation.primitive not in _TAKES_NO_INPUT:
            for source in inputs:
                buffer = self._buffer.get(source.name, -1)
                last = self.uses[source.name] == 1 and self._holders[buffer] == 1
                if buffer >= 0 and last and source.nbytes == array.nbytes:
                    return buffer
        self._nbytes.append(array.nbytes)
        self.held += array.nbytes
        return len(self._nbytes) - 1

    def _drop(self, name: str) -> None:
        """Forgets an array that is not needed any more."""
        if not self.uses[name] and name in self._buffer:
            self._read([self._buffer.pop(name)])

    def _read(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            self._holders[buffer] -= 1
            if buffer >= 0 and not self._holders[buffer]:
                self.held -= self._nbytes[buffer]
