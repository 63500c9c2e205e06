"""Recurrent layers over packed tokens (see `layout`), in one forward pass.

A branch is one call of the mixer, and so is a bucket. What rows share is computed once: the state after a branch's own
tokens is where each of its rows, and of the branches in it, begins. Padding is at the end of a row, and no state after
it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.core.branches import Branch
from mlx_parallm.model.recurrent import Mixer, RowStates, arrays_of, states_of_rows

States = Sequence[mx.array]
"""The states of rows, each array [rows, ...]."""


class PackedStates(RowStates):
    """The states of one recurrent layer in one forward pass with gradients."""

    differentiates = True

    def __init__(self, branches: Sequence[Branch], bank: AdapterBank) -> None:
        self._branches = branches
        self._bank = bank

    def branches_at(self) -> Iterator[tuple[Branch, int]]:
        """The branches, each with the index of its first token."""
        return zip(self._branches, accumulate((each.tokens for each in self._branches), initial=0), strict=False)

    def run(self, mixer: Mixer, x: mx.array) -> mx.array:
        """See `RowStates.run`."""
        call = _Call(mixer, x, self._bank)
        return mx.concatenate([part for branch, at in self.branches_at() for part in call.branch(branch, at, None)])


@dataclass(frozen=True, slots=True)
class _Call:
    """A mixer and the inputs of all tokens, [N, 1, in]."""

    mixer: Mixer
    x: mx.array
    bank: AdapterBank

    def branch(self, branch: Branch, at: int, above: States | None) -> Iterator[mx.array]:
        """The outputs of a branch, whose tokens lie from `at` on. `above`: the state after the branches above it."""
        if branch.length:
            output, above = self._rows(at, 1, branch.length, above)
            yield output
        at += branch.length
        for bucket in branch.buckets:
            if bucket.width:
                yield self._rows(at, bucket.rows, bucket.width, above)[0]
            at += bucket.tokens
        for inner in branch.branches:
            yield from self.branch(inner, at, above)
            at += inner.tokens

    def _rows(self, at: int, rows: int, width: int, above: States | None) -> tuple[mx.array, States]:
        """The outputs of rows of `width` tokens, [rows · width, 1, out], and the states after them."""
        begin = None if above is None else [mx.broadcast_to(each, (rows, *each.shape[1:])) for each in above]
        states, stop = states_of_rows(begin), at + rows * width
        with self.bank.using_part(at, stop):
            output = self.mixer(self.x[at:stop].reshape(rows, width, -1), states)
        return output.reshape(rows * width, 1, -1), arrays_of(states)
