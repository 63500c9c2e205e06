"""What a forward pass gives the host: drawn tokens with their logprobs, and the logprobs of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.reported_logprobs import Reported
from mlx_parallm.batch.rowwise import log_normaliser, token_logprobs, token_ranks, top_logprobs
from mlx_parallm.batch.sampler import RowSampling, Sampled
from mlx_parallm.core import TOP_LOGPROBS, ManyCandidates, TokenLogprob

Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's token, read back. `logprob` and `sampling_logprob` are None unless the row requested them."""

    token: int
    logprob: TokenLogprob | None
    sampling_logprob: float | None


def read_draws(sampled: Sampled, rows: Sequence[RowSampling]) -> list[Draw]:
    """Waits for the draws of a pass. `rows`: the options of its rows, in order."""
    tokens = cast(list[int], sampled.tokens.tolist())
    return [
        Draw(*each)
        for each in zip(tokens, _logprobs(sampled, rows, tokens), _sampling_logprobs(sampled, rows), strict=True)
    ]


def _logprobs(sampled: Sampled, rows: Sequence[RowSampling], tokens: Sequence[int]) -> Sequence[TokenLogprob | None]:
    """Logprobs of each row's token; None in rows that did not request them."""
    if sampled.reported is None:
        return [None] * len(tokens)
    tops = _reported_tops(sampled.reported, len(tokens))
    return [_logprob(*each) for each in zip(rows, tokens, _floats(sampled.reported.logprobs), tops, strict=True)]


def _reported_tops(reported: Reported, rows: int) -> list[Candidates]:
    """The best tokens of each row."""
    tops: list[Candidates] = [()] * rows
    if reported.top_ids is not None and reported.top_logprobs is not None:
        tops = _candidates(reported.top_ids, reported.top_logprobs)
    for row, best in reported.many.items():
        (tops[row],) = _candidates(*best)
    return tops


def _logprob(row: RowSampling, token: int, value: float, top: Candidates) -> TokenLogprob | None:
    count = row.params.top_logprobs
    return None if count is None else TokenLogprob(token, value, top[:count])


def _sampling_logprobs(sampled: Sampled, rows: Sequence[RowSampling]) -> Sequence[float | None]:
    """Logprobs of each row's token under the distribution that drew it; None in rows that did not request them."""
    if sampled.sampling_logprobs is None:
        return [None] * len(rows)
    values = _floats(sampled.sampling_logprobs)
    return [value if row.sampling_logprobs else None for row, value in zip(rows, values, strict=True)]


class PromptScores:
    """Logprobs of prompt tokens, as lazy arrays.

    Args:
        logits: of the positions before the tokens, [T, V].
        targets: the T tokens.
        top: how many of the best alternatives to return for each.
    """

    def __init__(self, logits: mx.array, targets: Sequence[int], top: int) -> None:
        logits = logits.astype(mx.float32)
        normaliser = log_normaliser(logits)
        ids = mx.array(list(targets), mx.uint32)
        self._targets, self._top = targets, top
        self._scores, self._ranks = token_logprobs(logits, ids, normaliser), token_ranks(logits, ids)
        self._best = top_logprobs(logits, normaliser, top) if top else ()

    def arrays(self) -> list[mx.array]:
        return [self._scores, self._ranks, *self._best]

    def read(self) -> list[TokenLogprob]:
        """Waits for the arrays. The raw model's logprob (fp32), the best alternatives and the rank of each token."""
        tops = [best[: self._top] for best in _candidates(*self._best)] if self._best else [()] * len(self._targets)
        ranks = cast(list[int], self._ranks.tolist())
        return [TokenLogprob(*each) for each in zip(self._targets, _floats(self._scores), tops, ranks, strict=True)]


def _candidates(ids: mx.array, logprobs: mx.array) -> list[Candidates]:
    """[T, K] ids and logprobs → T times K candidates."""
    if ids.shape[-1] > TOP_LOGPROBS:
        arrays = zip(np.array(ids, np.int32), np.array(logprobs, np.float32), strict=True)
        return [ManyCandidates.of_bytes(row_ids.tobytes(), row_values.tobytes()) for row_ids, row_values in arrays]
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def _floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
