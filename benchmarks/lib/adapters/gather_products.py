"""Runs the low-rank products of a decode step alone: the least that any mixed batch of adapters has to compute.

There is one product with the joint `a` for each group of linears that share an input, and one with `b` for each linear.
"""

from collections.abc import Sequence

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_parallm.adapters.bank import AdapterBank


class GatherProducts:
    """Makes the same `gather_mm` calls, with the same shapes, as a decode step of `rows` rows. All inputs are ones."""

    def __init__(self, bank: AdapterBank, rows: int) -> None:
        self._groups = [group for group in bank.groups.values() if group.b]
        widths = {bank.max_rank, *(int(group.a.shape[1]) for group in self._groups)}
        self._inputs = {width: mx.ones((rows, 1, width)) for width in widths}
        mx.eval(list(self._inputs.values()))

    def step(self, slots: Sequence[int]) -> None:
        """Evaluates all products of one step. `slots` has one slot per row; if all are equal, dense products are
        used."""
        batch = len(slots) if len(set(slots)) > 1 else 1
        indices = mx.array(list(slots[:batch]), mx.uint32)
        factors = [factor for group in self._groups for factor in (group.a, *group.b.values())]
        mx.eval([mx.gather_mm(self._input(factor, batch), factor, rhs_indices=indices) for factor in factors])

    def _input(self, factor: mx.array, batch: int) -> mx.array:
        width = factor.shape[1]
        return self._inputs[width].reshape(batch, -1, width)
