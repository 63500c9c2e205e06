"""Pacer: how a micro-step is cut into units of device work that keep to a latency budget.

    forward, layer by layer ─▶ head: losses, block by block ─▶ head backward ─▶ backward, layer by layer
    └────── unit ──────┘└──────── unit ────────┘└────────── unit ──────────┘└──────── unit ────────┘

A micro-step is one lazy graph. Units only decide when its parts are computed, never what is computed, so an update is
the same to the bit however it was cut. The smallest unit is one layer, or one block of positions of the head, of one
micro-step, so groups of any size and prompts of any length can be trained beside requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

_TARGET = 0.75
"""Fraction of the budget that a unit aims at; the rest absorbs noise in the measured times."""

_LATEST_START = 0.5
"""Fraction of that target after which no new job is begun in the unit."""

_NEWEST = 0.5
"""Weight of the newest measurement in the running mean of a stage kind's time."""


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


class Pacer:
    """Evaluates stages in order: in each unit as many as its budget is expected to hold, and at least one.

    Expected times are kept for each kind of stage: per token of a micro-batch, or per position of the head. `budget`:
    seconds.
    """

    def __init__(self, budget: float = 0.5) -> None:
        self.budget = budget
        self._seconds_per_token: dict[StageKind, float] = {}
        self._began = 0.0
        self._empty = True

    def begin(self) -> None:
        """Starts a unit."""
        self._began, self._empty = time.monotonic(), True

    @property
    def has_room(self) -> bool:
        """Whether there is time to begin another job in this unit."""
        return time.monotonic() - self._began <= _LATEST_START * _TARGET * self.budget

    def run(self, stages: Iterable[Stage], tokens: int) -> Iterator[None]:
        """Evaluates the stages of a micro-batch of `tokens` tokens; yields whenever the next one needs a new unit."""
        measured = self._seconds_per_token
        for stage in stages:
            layer = measured.get(StageKind.FORWARD, 0.0)
            size = tokens if stage.positions is None else stage.positions
            expected = size * measured.get(stage.kind, stage.kind.value * layer)
            ends = time.monotonic() - self._began + expected
            if not self._empty and ends > _TARGET * self.budget:
                yield
            started = time.monotonic()
            stage.evaluate()
            seconds = (time.monotonic() - started) / max(size, 1)
            before = measured.get(stage.kind, seconds)
            measured[stage.kind] = before + _NEWEST * (seconds - before)
            self._empty = False
