"""What a forward pass gives the host: drawn tokens with their logprobs, and the logprobs of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_parallm.batch.rowwise import log_normaliser, token_logprobs, token_ranks, top_logprobs
from mlx_parallm.batch.sampler import RowSampling, Sampled
from mlx_parallm.core import TokenLogprob


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
    if sampled.logprobs is None:
        return [None] * len(tokens)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        tops = _pairs(sampled.top_ids, sampled.top_logprobs)
    return [_logprob(*each) for each in zip(rows, tokens, _floats(sampled.logprobs), tops, strict=True)]


def _logprob(row: RowSampling, token: int, value: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob | None:
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
        tops = [pairs[: self._top] for pairs in _pairs(*self._best)] if self._best else [()] * len(self._targets)
        ranks = cast(list[int], self._ranks.tolist())
        return [TokenLogprob(*each) for each in zip(self._targets, _floats(self._scores), tops, ranks, strict=True)]


def _pairs(ids: mx.array, logprobs: mx.array) -> list[tuple[tuple[int, float], ...]]:
    """[T, K] ids and logprobs → T tuples of K pairs."""
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def _floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
