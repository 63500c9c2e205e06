"""Pools the hidden states of the rows that ask for a vector instead of tokens, in the pass that computes them.

prompt of 9 tokens, in chunks of 4, 4 and 1:    last   nothing, nothing, the state of token 9
                                                mean   a sum over 4, a sum over 4, a sum over 1; their sum / 9
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.spans import Span
from mlx_parallm.core import Pooling

if TYPE_CHECKING:
    from mlx_parallm.engine.sequence import Sequence


Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PooledParts:
    """What one pass adds to the pooled hidden states of some rows.

    spans: one for each of these rows.  hidden: lazy, float32 [rows, D]: the state of the last token of the prompt, or
    the sum of the states of the span.
    """

    spans: tuple[Span[Sequence], ...]
    hidden: mx.array

    def read(self) -> list[tuple[Span[Sequence], Vector]]:
        """Waits for the array."""
        return list(zip(self.spans, np.array(self.hidden), strict=True))


def pool(hidden: mx.array, spans: Seq[Span[Sequence]]) -> PooledParts | None:
    """Pools the rows of a pass that want it; None if no row has a part here. `hidden`: [N, D] of the tokens of all
    spans."""
    pooled: list[Span[Sequence]] = []
    parts: list[mx.array] = []
    stop = 0
    for span in spans:
        start, stop = stop, stop + span.tokens
        if span.row.pooling is Pooling.MEAN:
            parts.append(hidden[start:stop].astype(mx.float32).sum(axis=0))
        elif span.row.pooling is Pooling.LAST and span.stop == span.row.prompt_length:
            parts.append(hidden[stop - 1].astype(mx.float32))
        else:
            continue
        pooled.append(span)
    return PooledParts(tuple(pooled), mx.stack(parts)) if parts else None
