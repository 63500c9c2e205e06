"""A model whose q, k and v, and gate and up, are one product each: an experiment that `joined.py` measures.

The weights of linears with the same input are put together, and the first of them that is called computes all. Nothing
of the product uses this.
"""

from collections.abc import Callable, Sequence

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn

from mlx_parallm.model.linears import AdaptedLinear

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ARRAYS = ("weight", "scales", "biases", "bias")

Concatenate = Callable[[Sequence[mx.array]], mx.array]
"""Puts arrays together along their first axis."""


def join(model: nn.Module, concatenate: Concatenate = mx.concatenate) -> None:
    """Joins the base linears of each attention and MLP of a model with an adapter bank."""
    for module in model.modules():
        for names in _SAME_INPUT:
            linears = [getattr(module, name, None) for name in names]
            if all(isinstance(linear, AdaptedLinear) for linear in linears):
                product = _Product([linear.base for linear in linears], concatenate)
                for place, linear in enumerate(linears):
                    linear.base = _Part(linear.base, product, place)


class _Product:
    """One product for several linears. It keeps its result until each of them has taken its part."""

    def __init__(self, linears: Sequence[nn.Module], concatenate: Concatenate) -> None:
        ends = [0]
        for linear in linears:
            ends.append(ends[-1] + linear.weight.shape[0])
        self._ends = ends[1:-1]
        self._linear = _like(linears[0])
        for name in _ARRAYS:
            if name in linears[0]:
                self._linear[name] = concatenate([linear[name] for linear in linears])
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}

    def take(self, x: mx.array, place: int) -> mx.array:
        if self._input is not x:
            self._input, self._left = x, dict(enumerate(mx.split(self._linear(x), self._ends, axis=-1)))
        part = self._left.pop(place)
        if not self._left:
            self._input = None
        return part


class _Part(nn.Module):  # type: ignore[misc]
    """Takes the place of one of the joined linears. `weight` is there for code that asks for its shape."""

    def __init__(self, linear: nn.Module, product: _Product, place: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self._product = product
        self._place = place

    def __call__(self, x: mx.array) -> mx.array:
        return self._product.take(x, self._place)


def _like(linear: nn.Module) -> nn.Module:
    """A linear of the same kind without arrays."""
    twin = type(linear).__new__(type(linear))
    nn.Module.__init__(twin)
    for name, value in vars(linear).items():
        if not name.startswith("_") and name not in _ARRAYS:
            setattr(twin, name, value)
    return twin
