"""Functions whose activations are not kept, but computed again in the backward pass (gradient checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache

Tree = TypeVar("Tree")
"""Arrays in any nesting of lists and dicts."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A function of `arrays` that is computed again in the backward pass. `gradient`: that of its arrays, from them and
    the gradients of its outputs; None: it is derived."""

    function: Callable[..., list[mx.array]]
    arrays: Sequence[mx.array]
    gradient: Callable[[Sequence[mx.array], Sequence[mx.array]], Sequence[mx.array]] | None = None


_watching: ContextVar[Callable[[Unit], list[mx.array]] | None] = ContextVar("watching", default=None)


@contextmanager
def watched_by(watch: Callable[[Unit], list[mx.array]]) -> Iterator[None]:
    """While the block runs, a unit's outputs are what `watch` returns, and no gradient passes through it."""
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)


def watching() -> Callable[[Unit], list[mx.array]] | None:
    """What makes the outputs of units now; None: their own functions."""
    return _watching.get()


def recomputed(run: Callable[[Tree, mx.array], list[mx.array]]) -> Callable[[Tree, mx.array], list[mx.array]]:
    """The same function of (arguments, x), which is computed again in the backward pass. What it closes over gets no
    gradient.

    It waits for the gradient of the outputs before that, unlike `mx.checkpoint`, and gives no gradient before it has
    all of them. So the backward pass of one layer, or of a segment of it, never overlaps that of the next one: what
    only one of them needs is in memory at a time, and several ranks make their sums in the same order.
    """

    watch = watching()
    if watch is not None:
        return lambda arguments, x: watch(Unit(*_flat(run, arguments, x)))

    @mx.custom_function
    def again(arguments: Tree, x: mx.array) -> list[mx.array]:
        return run(arguments, x)

    @again.vjp
    def gradient(
        primals: tuple[Tree, mx.array], cotangents: list[mx.array], _outputs: list[mx.array]
    ) -> tuple[Tree, mx.array]:
        arguments, x = primals
        (x,) = mx.depends([x], list(cotangents))
        flat, arrays = _flat(run, arguments, x)
        _, gradients = mx.vjp(flat, arrays, list(cotangents))
        of_x, *of_leaves = mx.depends(gradients, gradients)
        return _with_leaves(arguments, of_leaves), of_x

    return cast(Callable[[Tree, mx.array], list[mx.array]], again)


def _flat(
    run: Callable[[Tree, mx.array], list[mx.array]], arguments: Tree, x: mx.array
) -> tuple[Callable[..., list[mx.array]], list[mx.array]]:
    """The function of x and all arrays of its arguments, and these arrays."""
    return lambda x, *leaves: run(_with_leaves(arguments, leaves), x), [
        x,
        *(leaf for _, leaf in tree_flatten(arguments)),
    ]


def _with_leaves(arguments: Tree, leaves: Sequence[mx.array]) -> Tree:
    rest = iter(leaves)
    return cast(Tree, tree_map(lambda _: next(rest), arguments))


def floats_of(value: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """The floating-point arrays in any nesting of tuples, lists and dicts, each once, and a function that gives the
    same nesting with others in their place. MLX loses the gradient of an array that a function gives twice."""
    found: dict[int, mx.array] = {}
    indices: list[int] = []

    def keep(array: mx.array) -> mx.array:
        found.setdefault(id(array), array)
        indices.append(list(found).index(id(array)))
        return array

    _walk(value, keep)

    def with_arrays(arrays: Sequence[mx.array]) -> Any:
        rest = iter(indices)
        return _walk(value, lambda _: arrays[next(rest)])

    return list(found.values()), with_arrays


def _walk(value: Any, use: Callable[[mx.array], mx.array]) -> Any:
    if isinstance(value, mx.array):
        return use(value) if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, dict):
        return {name: _walk(each, use) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_walk(each, use) for each in value)
    if _passes_arrays_on(value):
        copied = copy(value)
        vars(copied).update(_walk(vars(value), use))
        return copied
    return value


def _passes_arrays_on(value: Any) -> bool:
    """Whether it is an object of a model's file, to which its layers add what later ones read."""
    kind = type(value)
    of_model = kind.__module__.startswith("mlx_lm.models.") and kind.__module__ != cache.__name__
    return of_model and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
