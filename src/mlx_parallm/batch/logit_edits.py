"""Sparse additions to a batch's logits: `logit_bias`, and the ban of end tokens below `min_tokens`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Edit:
    """Adds `value` to logit `token` of `row` while the row has generated fewer than `until` tokens."""

    row: int
    token: int
    value: float
    until: float = math.inf


class LogitEdits:
    """All edits of a batch, as one scatter."""

    __slots__ = ("_mx_rows", "_rows", "_tokens", "_until", "_values")

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._rows = np.array([edit.row for edit in edits], np.int32)
        self._values = np.array([edit.value for edit in edits], np.float32)
        self._until = np.array([edit.until for edit in edits], np.float64)
        self._mx_rows = mx.array(self._rows)
        self._tokens = mx.array([edit.token for edit in edits], mx.int32)

    def apply(self, logits: mx.array, positions: NDArray[np.int64]) -> mx.array:
        """fp32 [R, V] and tokens generated so far [R] → fp32 [R, V]; values for one token add up."""
        live = positions[self._rows] < self._until
        if not live.any():
            return logits
        return logits.at[self._mx_rows, self._tokens].add(mx.array(np.where(live, self._values, np.float32(0))))
