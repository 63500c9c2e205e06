"""Finds out that an answer repeats itself without end: its last tokens are one sequence, over and over."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.core import RepetitionLimits

CHECK_EVERY = 31
"""Tokens between two checks. It is prime, so the checks of a loop see different places of its period."""
FEW_TOKENS = 8
"""Up to so many different tokens, a period may well be meant, as in a matrix of zeros or a table of empty cells."""
_FIRST = 16
"""Tokens that are compared before all of them are, because most texts differ there."""


def repeats(tokens: Sequence[int], start: int, limits: RepetitionLimits) -> bool:
    """Whether the tokens from `start` on end with a sequence that is repeated for as long as `limits` say.

    The shortest period decides. All longer ones are its multiples if `min_tokens` is at least twice `max_period` (Fine
    and Wilf, 1965).
    """
    generated = len(tokens) - start
    if generated < limits.min_tokens:
        return False
    for period in range(limits.min_period, min(limits.max_period, generated // limits.min_count) + 1):
        if tokens[-1 - period] != tokens[-1]:
            continue
        length = max(limits.min_tokens, limits.min_count * period)
        if _has_period(tokens, period, min(length, period + _FIRST)) and _has_period(tokens, period, length):
            meant = 1 < len(set(tokens[-period:])) <= FEW_TOKENS
            least = limits.min_tokens_of_few if meant else length
            return least <= generated and _has_period(tokens, period, least)
    return False


def _has_period(tokens: Sequence[int], period: int, length: int) -> bool:
    """Whether the last tokens, `length` of them, have this period: each but the first ones is equal to the one `period`
    places before it."""
    end = len(tokens)
    return tokens[end - length : end - period] == tokens[end - length + period :]
