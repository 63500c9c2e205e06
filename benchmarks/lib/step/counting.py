"""Counts the kernels and bytes of a function's graph, as Metal would run it. Nothing is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.step.graph import VIEWS, Graph, Kind, Operation, exported, primitives
from benchmarks.lib.step.metal import Cost, costs
from benchmarks.lib.step.stand_ins import Recorder

_PRODUCTS = frozenset({"Matmul", "AddMM", "QuantizedMatmul"})

Prepare = Callable[[], Callable[[], Any]]
"""Makes all that a function needs, and returns the function. What the function returns or evaluates is its result."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Kernels launched, and bytes read and written.

    launches: of all kernels
    repeated: those of them that compute what another one computes; their bytes are not counted
    sampling_launches: those of them after the vocabulary projection
    nbytes: all bytes, which are the following together
    weights: bytes read of the layers' weights
    keys_and_values: bytes read of stored keys and values
    head: bytes read of the vocabulary projection
    adapters: bytes read of adapters
    sampling: bytes read and written after the vocabulary projection
    activations: all other bytes
    """

    launches: int
    repeated: int
    sampling_launches: int
    nbytes: int
    weights: int
    keys_and_values: int
    head: int
    adapters: int
    sampling: int
    activations: int


def count(prepare: Prepare, recorder: Recorder) -> Counts:
    """Counts what the function that `prepare` makes launches, reads and writes.

    Runs it twice, each time newly prepared. Call it inside `gpu_graphs`.
    """
    operations = trace(prepare, recorder)
    every = costs(operations)
    merged = sum(operation.name not in VIEWS for operation in operations) - len(recorder.fused)
    repeated = sum(name not in VIEWS for name in _drawn(prepare, recorder)) - merged
    return _summed(operations, every, repeated)


def nodes(prepare: Prepare, recorder: Recorder) -> int:
    """The primitives of the function's graph, views included. A fused kernel is one, as is each fusion of `mx.compile`.
    Equal ones count as often as they will run; views by strides are left out, because placeholders are such views."""
    names = _drawn(prepare, recorder)
    return sum(name != "AsStrided" for name in names) + sum(call.launches for call in recorder.fused)


def trace(prepare: Prepare, recorder: Recorder) -> list[Operation]:
    """All operations of the function, fused kernels included. Equal ones on the same arrays are there once."""
    function = prepare()

    def results() -> list[mx.array]:
        recorder.clear()
        recorder.want(function())
        fused = [array for call in recorder.fused for array in (*call.inputs, *call.outputs)]
        return [*recorder.evaluated, *fused]

    graph = exported(results)
    return [*graph.operations, *_fused(graph, recorder)]


def _fused(graph: Graph, recorder: Recorder) -> list[Operation]:
    """The calls of fused kernels as operations. Their arrays are the last outputs of the graph."""
    arrays = iter(graph.outputs[len(recorder.evaluated) :])
    return [
        Operation(
            call.name,
            tuple(next(arrays) for _ in call.inputs),
            tuple(next(arrays) for _ in call.outputs),
            launches=call.launches,
        )
        for call in recorder.fused
    ]


def _drawn(prepare: Prepare, recorder: Recorder) -> list[str]:
    function = prepare()
    recorder.clear()
    recorder.want(function())
    return primitives([*recorder.evaluated, *(array for call in recorder.fused for array in call.inputs)])


def _summed(operations: Sequence[Operation], every: Sequence[Cost], repeated: int) -> Counts:
    forward = _forward(operations, every)
    total, sampling = Cost(), Cost()
    for place, cost in enumerate(every):
        (total if forward[place] else sampling).add(cost)
    named = {kind: total.read.get(kind, 0) for kind in Kind}
    return Counts(
        launches=total.launches + sampling.launches + repeated,
        repeated=repeated,
        sampling_launches=sampling.launches,
        nbytes=total.nbytes + sampling.nbytes,
        weights=named[Kind.WEIGHTS],
        keys_and_values=named[Kind.KEYS_AND_VALUES],
        head=named[Kind.HEAD],
        adapters=named[Kind.ADAPTERS],
        sampling=sampling.nbytes,
        activations=total.written + named[Kind.OTHER],
    )


def _forward(operations: Sequence[Operation], every: Sequence[Cost]) -> list[bool]:
    """Whether each operation belongs to the model's forward pass: the product that reads the head, and all before it.
    Every operation does if there is no head."""
    heads = [
        place
        for place, (operation, cost) in enumerate(zip(operations, every, strict=True))
        if operation.name in _PRODUCTS and Kind.HEAD in cost.read
    ]
    if not heads:
        return [True] * len(operations)
    makers: dict[str, int] = {}
    for place, operation in enumerate(operations):
        if operation.name != "AsStrided" or any(operation.arguments[1]):  # a placeholder's maker is its fused kernel
            makers.update({output.name: place for output in operation.outputs})
    found, waiting = set(heads), list(heads)
    while waiting:
        for each in operations[waiting.pop()].inputs:
            place = makers.get(each.name)
            if place is not None and place not in found:
                found.add(place)
                waiting.append(place)
    return [place in found for place in range(len(operations))]
