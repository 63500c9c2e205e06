"""Layers of experts whose linears add each token's own adapter.

mlx-lm's `SwitchGLU` gets the experts that the router chose for each token, sorts the pairs of a token and an expert by
expert, and calls its linears with the sorted experts; so these do not know whose token a pair is. Here a token's
adapter travels with its experts: the indices that are sorted are

    expert · adapters + number of the token's adapter

which are in the order of experts still. The linears take both numbers out of an index again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import ExpertCall
from mlx_parallm.adapters.weights import LinearSpec

EXPERT_LINEARS = (SwitchLinear, QuantizedSwitchLinear)


class IndexFormat:
    """What the indices mean that the linears of a layer of experts get: `adapters` is the number of adapters in them;
    None if they are experts alone, because no adapter changes the layer in this call."""

    def __init__(self) -> None:
        self.adapters: int | None = None
        self._last: tuple[mx.array, mx.array, mx.array] | None = None

    @contextmanager
    def of(self, adapters: int) -> Iterator[None]:
        """While the block runs, indices contain so many adapters."""
        self.adapters = adapters
        try:
            yield
        finally:
            self.adapters = self._last = None

    def split(self, indices: mx.array, adapters: int) -> tuple[mx.array, mx.array]:
        """The experts and the adapters of indices. They are computed once for linears that get the same indices."""
        if self._last is None or self._last[0] is not indices:
            self._last = (indices, *mx.divmod(indices, adapters))
        return self._last[1:]


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """A `SwitchGLU` that tells its linears which adapter each token uses. Without an adapter, only `base` runs.

    Args:
        base: its linears are `AdaptedExpertLinear`.
        format: the same as theirs.
        specs: of its linears.
    """

    def __init__(self, base: SwitchGLU, bank: AdapterBank, specs: Sequence[LinearSpec], format: IndexFormat) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._names = frozenset(spec.group for spec in specs)
        self._format = format

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Tokens [..., in] and the experts chosen for each, [..., k] → [..., k, out]."""
        context = self._bank.context
        if context is None or not context.changes(self._bank.groups[name] for name in self._names):
            return cast(mx.array, self.base(x, experts))
        tokens = context.token_adapters()
        if tokens is None:
            return self._run(x, experts, 1)
        numbers = tokens.numbers.reshape(*experts.shape[:-1], 1)
        return self._run(x, experts * tokens.count + numbers, tokens.count)

    def _run(self, x: mx.array, indices: mx.array, adapters: int) -> mx.array:
        with self._format.of(adapters):
            return cast(mx.array, self.base(x, indices))


class AdaptedExpertLinear(nn.Module):  # type: ignore[misc]
    """The linears of all experts at one path, which add the LoRA product of each token's adapter."""

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec, format: IndexFormat) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._group = bank.groups[spec.group]
        self._format = format
        self.path = spec.path

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Inputs [..., 1, in], and indices in the layer's format, of one shape that [...] can be broadcast to →
        [..., 1, out]."""
        context, adapters = self._bank.context, self._format.adapters
        if context is None or adapters is None:
            return cast(mx.array, self.base(x, indices, sorted_indices=sorted_indices))
        experts, numbers = self._format.split(indices, adapters)
        y = self.base(x, experts, sorted_indices=sorted_indices)
        return context.adapt_experts(self._group, self.path, ExpertCall(x, experts, numbers, sorted_indices), y)
