"""How large a micro-step may be: how long they take is learnt from those that were run.

    seconds = fixed + per_size · size

A size is in token equivalents: a token that passes the trunk is 1, a trained position, whose logits are dear, as much
as its share of the head costs beside a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_AIM = 0.85
"""Of the budget: as much noise as the rest does not overrun it."""
_WINDOW = 48
_FORGET = 0.9
"""Weight of a micro-step beside that of the next one."""
_TRUST = 0.01
"""Weight of the prior's proportions beside that of the newest micro-step."""
_LEAST = 0.01
"""Of what the prior makes of a term, whatever was observed: no term is ever nothing, or less."""
_FIXED = 16.0
"""Token equivalents that the prior takes a micro-step to cost before its first token."""
_FIRST = 256
_GROWTH = 2.0
"""Times the largest micro-step seen: a line is not to be trusted far from where it was measured."""


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Multiplications of a micro-step for a token in the trunk, and for a trained position in the head."""

    trunk: float
    head: float

    @classmethod
    def of(cls, trunk_numbers: int, head_numbers: int, checkpointed: bool, reference: bool) -> TokenCost:
        """Of matrices that have no gradients themselves.

        The trunk runs forward and backward, and forward once more where its layers are checkpointed; the head
        forward and backward, where it computes the logits again. The reference is one forward more of both.
        """
        trunk_passes, head_passes = 2 + checkpointed + reference, 3 + reference
        return cls(float(trunk_passes * max(trunk_numbers, 1)), float(head_passes * head_numbers))

    @property
    def target_size(self) -> float:
        """Of a trained position, in token equivalents, beside its token in the trunk."""
        return self.head / self.trunk


class Pacer:
    """Predicts from the last few dozen micro-steps, the newest counting most. Pure arithmetic.

    Args:
        per_size: seconds of one token equivalent, guessed. How the terms stand to each other counts for a little
            once there are micro-steps to learn from, how large they are for nothing.
    """

    def __init__(self, per_size: float) -> None:
        self._prior = np.array([_FIXED * per_size, per_size])
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def observe(self, size: int, seconds: float) -> None:
        """One micro-step."""
        self._seen.append((float(size), max(seconds, 1e-9)))

    def seconds(self, size: int) -> float:
        """That a micro-step of this size takes."""
        fixed, per_size = self._terms()
        return float(fixed + per_size * size)

    def size_within(self, seconds: float) -> int:
        """The largest that is to be tried within this time; 1 at least."""
        if not self._seen:
            return self.first_size(seconds)
        largest = max(size for size, _ in self._seen)
        return max(1, int(min(_size(self._terms(), seconds), _GROWTH * largest)))

    def first_size(self, seconds: float) -> int:
        """The same by the guess alone, and with care: it depends on nothing that was observed."""
        return max(1, int(min(_size(self._prior, seconds), _FIRST)))

    def _terms(self) -> Floats:
        """fixed and per_size: least squares of relative errors, both positive."""
        if not self._seen:
            return self._prior
        sizes, seconds = np.array(self._seen).T
        weights = _FORGET ** np.arange(sizes.size)[::-1]
        columns = np.stack([np.ones_like(sizes), sizes], axis=1) * self._prior
        guessed = columns.sum(axis=1)
        level = float(np.average(seconds / guessed, weights=weights))
        columns /= guessed[:, None]
        matrix = (weights * columns.T) @ columns + _TRUST * np.eye(2)
        vector = (weights * columns.T) @ (seconds / (level * guessed)) + _TRUST
        return level * self._prior * _solve(matrix, vector)


def _solve(matrix: Floats, vector: Floats) -> Floats:
    """Of two unknowns; one that would come out under `_LEAST` is held there, and the other follows."""
    solution = np.linalg.solve(matrix, vector)
    for low, other in ((0, 1), (1, 0)):
        if solution[low] < _LEAST:
            solution[low] = _LEAST
            solution[other] = (vector[other] - matrix[other, low] * _LEAST) / matrix[other, other]
    return solution


def _size(terms: Floats, seconds: float) -> float:
    fixed, per_size = terms
    return float((_AIM * seconds - fixed) / per_size)
