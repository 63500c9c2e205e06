"""Recurrent layers over packed tokens (see `layout`), in one forward pass.

A branch is one call of the mixer, and so is a bucket. What rows share is computed once: the state after a branch's own
tokens is where each of its rows, and of the branches in it, begins. Padding is at the end of a row, and no state after
it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.core.branches import Branch
from mlx_parallm.model.recurrent import Mixer, Part, RowStates


def branches_at(branches: Sequence[Branch]) -> Iterator[tuple[Branch, int]]:
    """The branches, each with the index of its first token."""
    return zip(branches, accumulate((each.tokens for each in branches), initial=0), strict=False)


class PackedStates(RowStates):
    """The states of one recurrent layer in one forward pass with gradients. `arrays`: how many it keeps."""

    differentiates = True

    def __init__(self, branches: Sequence[Branch], arrays: int, bank: AdapterBank) -> None:
        self._branches = branches
        self._arrays = arrays
        self._bank = bank
        self._parts: list[_Part] = []

    def run(self, mixer: Mixer) -> Iterator[Any]:
        """See `RowStates.run`."""
        if not self._parts:
            tokens = sum(branch.tokens for branch in self._branches)
            placed = branches_at(self._branches)
            self._parts = [part for branch, at in placed for part in _parts(branch, at, None, tokens)]
        for part in self._parts:
            with self._bank.using_part(part.start, part.stop):
                yield mixer(part, part.states(self._arrays))


class _Part(Part):
    """Rows of a bucket, or the tokens of a branch. `above`: the part with the tokens before theirs."""

    def __init__(self, start: int, rows: int, width: int, above: _Part | None, tokens: int) -> None:
        super().__init__(start, start + rows * width, rows, tokens)
        self._above = above
        self._states: ArraysCache | None = None

    def states(self, arrays: int) -> ArraysCache:
        """The states of the rows. Several mixers of a layer may use them, each some of the arrays: those that are not
        set yet are those after the part above."""
        states = self._states = self._states or ArraysCache(arrays)
        for index, array in enumerate(self._above.states(arrays).cache if self._above is not None else ()):
            if states.cache[index] is None and array is not None:
                states[index] = mx.broadcast_to(array, (self.rows, *array.shape[1:]))
        return states


def _parts(branch: Branch, at: int, above: _Part | None, tokens: int) -> Iterator[_Part]:
    """The parts of a branch, whose tokens lie from `at` on."""
    if branch.length:
        above = _Part(at, 1, branch.length, above, tokens)
        yield above
    at += branch.length
    for bucket in branch.buckets:
        if bucket.width:
            yield _Part(at, bucket.rows, bucket.width, above, tokens)
        at += bucket.tokens
    for inner in branch.branches:
        yield from _parts(inner, at, above, tokens)
        at += inner.tokens
