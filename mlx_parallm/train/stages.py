"""Stages: the parts of a micro-step, which are computed one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx


class StageKind(Enum):
    """What a stage computes. The value is its cost relative to the forward pass of one layer: a guess that is used
    until a stage of this kind has been measured."""

    FORWARD = 1.0
    HEAD = 8.0
    HEAD_BACKWARD = 20.0
    BACKWARD = 3.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Lazy arrays (any tree) that are evaluated together, after the arrays of the stages before it.

    `positions`: how many positions of the head it computes; None if it computes something for every token.
    """

    kind: StageKind
    arrays: object
    positions: int | None = None

    def evaluate(self) -> None:
        """Computes the arrays, and waits for them."""
        mx.eval(self.arrays)
