"""Masks over the vocabulary: rows whose text follows a grammar draw only what that allows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.rowwise import RowSubset
from mlx_parallm.core import GrammarState

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE = np.where(_BITS, 0, -np.inf).astype(np.float32)
"""[256, 8]: what eight tokens' bits add to their logits."""


class TokenMasks:
    """Of the rows `chosen` of a batch of `rows`; made anew for every token, on the host.

    Args:
        states: of those rows, in order; each has accepted every token of its row.
    """

    def __init__(self, states: Sequence[GrammarState], chosen: Sequence[int], rows: int, vocab_size: int) -> None:
        self._states = states
        self._rows = RowSubset.of(chosen, rows)
        self._vocab_size = vocab_size
        self._bias_of_byte = mx.array(_BIAS_OF_BYTE)

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V], -inf where a token is not allowed."""
        words = np.zeros((len(self._states), -(-self._vocab_size // 32)), "<u4")
        for state, mask in zip(self._states, words, strict=True):
            state.fill(mask.data)
        bias = self._bias_of_byte[mx.array(words.view(np.uint8))].flatten(1)[:, : self._vocab_size]
        return self._rows.put(self._rows.take(logits) + bias, logits)
