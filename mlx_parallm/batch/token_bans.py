"""Stages of sampling that leave only some tokens to a row: allowed tokens, grammars and bad words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.rowwise import RowSubset
from mlx_parallm.core import GrammarState

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE = np.where(_BITS, 0, -np.inf).astype(np.float32)
"""[256, 8]: the bias of eight tokens for each value of a mask's byte, 0 for a set bit and -inf for a clear one."""


def _biased(logits: mx.array, masks: NDArray[np.uint8]) -> mx.array:
    """fp32 [n, V] → fp32 [n, V], -inf for tokens whose bit of `masks`, [n, ceil(V / 8)] or wider, is clear."""
    bias = mx.array(_BIAS_OF_BYTE)[mx.array(masks)].flatten(1)
    return logits + bias[:, : logits.shape[-1]]


class AllowedTokens:
    """The rows that may draw only some tokens, the same ones at each position.

    Args:
        masks: of these rows, uint8 [n, ceil(V / 8)]; see `SamplingParams.allowed_tokens`.
        rows: these rows of the batch.
    """

    def __init__(self, masks: NDArray[np.uint8], rows: RowSubset) -> None:
        self._masks = masks
        self._rows = rows

    @classmethod
    def of(cls, masks: Sequence[bytes], vocab_size: int) -> AllowedTokens | None:
        """The stage for rows with these masks; None if no row has one."""
        chosen = [i for i, mask in enumerate(masks) if mask]
        size = -(-vocab_size // 8)
        bits = [np.frombuffer(masks[i], np.uint8, count=size) for i in chosen]
        return cls(np.stack(bits), RowSubset.of(chosen, len(masks))) if chosen else None

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V], -inf for tokens that are not allowed."""
        return self._rows.put(_biased(self._rows.take(logits), self._masks), logits)


class TokenMasks:
    """Grammar masks of a batch, computed on the host for every token.

    Args:
        states: of the rows with grammars. Each must have accepted every token of its row before `apply`.
        chosen: the numbers of these rows in the batch, ascending.
        rows: the number of rows in the batch.
    """

    def __init__(self, states: Sequence[GrammarState], chosen: Sequence[int], rows: int, vocab_size: int) -> None:
        self._states = states
        self._rows = RowSubset.of(chosen, rows)
        self._vocab_size = vocab_size

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V], -inf for tokens that the grammar does not allow."""
        words = np.zeros((len(self._states), -(-self._vocab_size // 32)), "<u4")
        for state, mask in zip(self._states, words, strict=True):
            state.fill(mask.data)
        return self._rows.put(_biased(self._rows.take(logits), words.view(np.uint8)), logits)


class BadWords:
    """The token sequences that a row must not write.

    Args:
        words: none of them empty.
        tokens: the row's own list, which has its prompt and every token that has been read back.
        prompt_length: only what comes after the prompt counts.
    """

    __slots__ = ("_by_end", "_prompt_length", "_single", "_tokens", "needs_previous_tokens")

    def __init__(self, words: Sequence[tuple[int, ...]], tokens: Sequence[int], prompt_length: int) -> None:
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._single = {word[0] for word in words if len(word) == 1}
        self._by_end: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_end[word[-2]].append(word)
        self.needs_previous_tokens = bool(self._by_end)

    def after(self, tokens: Sequence[int]) -> BadWords:
        """The bad words of the row if it had drawn these tokens too."""
        following = copy(self)
        longest = max((len(word) for words in self._by_end.values() for word in words), default=0)
        first = max(self._prompt_length, len(self._tokens) - longest)
        following._tokens, following._prompt_length = [*self._tokens[first:], *tokens], 0
        return following

    def banned(self) -> set[int]:
        """The tokens that would complete a word now."""
        written = self._tokens
        if len(written) <= self._prompt_length:
            return self._single
        return self._single.union(
            word[-1] for word in self._by_end.get(written[-1], ()) if self._ends_with(list(word[:-1]))
        )

    def _ends_with(self, beginning: list[int]) -> bool:
        start = len(self._tokens) - len(beginning)
        return start >= self._prompt_length and self._tokens[start:] == beginning


class BadWordBans:
    """The bad words of a batch.

    Args:
        words: of the rows that have some.
        rows: these rows of the batch.
    """

    def __init__(self, words: Sequence[BadWords], rows: RowSubset) -> None:
        self._words = words
        self._rows = rows

    @classmethod
    def of(cls, words: Sequence[BadWords | None]) -> BadWordBans | None:
        """The stage for rows with these bad words; None if no row has any."""
        chosen = {i: each for i, each in enumerate(words) if each is not None}
        return cls(list(chosen.values()), RowSubset.of(list(chosen), len(words))) if chosen else None

    @property
    def needs_previous_tokens(self) -> bool:
        """Whether all drawn tokens must have been read back before `apply`."""
        return any(words.needs_previous_tokens for words in self._words)

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V], -inf for tokens that would complete a bad word. A row that could draw nothing else
        may draw them after all."""
        bans = [(row, token) for row, words in enumerate(self._words) for token in sorted(words.banned())]
        if not bans:
            return logits
        before = self._rows.take(logits)
        rows, tokens = np.array(bans, np.int32).T
        after = before.at[mx.array(rows), mx.array(tokens)].add(-mx.inf)
        any_left = after.max(-1, keepdims=True) > -mx.inf
        return self._rows.put(mx.where(any_left, after, before), logits)
