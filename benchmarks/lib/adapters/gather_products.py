"""Runs the low-rank products of a decode step alone: the least that any mixed batch of adapters has to compute."""

from collections.abc import Sequence

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import ForwardContext


class GatherProducts:
    """Makes the same products, with the same shapes, as a decode step of `rows` rows, and adds them to zeros. All
    inputs are ones."""

    def __init__(self, bank: AdapterBank, rows: int) -> None:
        self._groups = [group for group in bank.groups.values() if group.places]
        self._inputs = {width: mx.ones((rows, 1, width)) for width in {group.a.shape[-2] for group in self._groups}}
        self._outputs = {
            spec.out_features: mx.zeros((rows, 1, spec.out_features))
            for group in self._groups
            for spec in group.specs.values()
        }
        mx.eval(self._inputs, self._outputs)

    def step(self, slots: Sequence[int]) -> None:
        """Evaluates all products of one step. `slots` has one slot per row."""
        context = ForwardContext(slots, [1] * len(slots))
        outputs = []
        for group in self._groups:
            x = self._inputs[group.a.shape[-2]]
            for path in group.places:
                zeros = self._outputs[group.specs[path].out_features]
                outputs.append(
                    context.adapt(group, path, x, lambda rows, zeros=zeros: zeros.reshape(*rows.shape[:-1], -1))
                )
        mx.eval(outputs)
