"""Functions whose activations are not kept, but computed again in the backward pass (gradient checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

Tree = TypeVar("Tree")
"""Arrays in any nesting of lists and dicts."""


def recomputed(run: Callable[[Tree, mx.array], mx.array]) -> Callable[[Tree, mx.array], mx.array]:
    """The same function of (factors, x), which is computed again in the backward pass.

    It waits for the gradient of the output before that, unlike `mx.checkpoint`. So the backward pass of one layer never
    overlaps that of the next one, and several ranks make their sums in the same order.
    """

    @mx.custom_function
    def again(factors: Tree, x: mx.array) -> mx.array:
        return run(factors, x)

    @again.vjp
    def gradient(primals: tuple[Tree, mx.array], cotangent: mx.array, _output: mx.array) -> tuple[Tree, mx.array]:
        factors, x = primals

        def with_leaves(leaves: Sequence[mx.array]) -> Tree:
            rest = iter(leaves)
            return cast(Tree, tree_map(lambda _: next(rest), factors))

        def flat(x: mx.array, *leaves: mx.array) -> mx.array:
            return run(with_leaves(leaves), x)

        (x,) = mx.depends([x], [cotangent])
        arguments = [x, *(leaf for _, leaf in tree_flatten(factors))]
        _, (of_x, *of_leaves) = mx.vjp(flat, arguments, [cotangent])
        return with_leaves(of_leaves), of_x

    return cast(Callable[[Tree, mx.array], mx.array], again)
