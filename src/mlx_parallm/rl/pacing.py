"""Cutting a micro-step into units of device work that keep to a latency budget.

    forward, layer by layer ─▶ head: losses ─▶ turn: head and top layer backward ─▶ backward, layer by layer
    └────── unit ──────┘└──────── unit ────────┘└────────── unit ──────────┘└──────── unit ────────┘

The whole of it is one lazy graph; what is in a unit is only when its parts are computed, never what is computed. So an
update is the same to the bit however its units fell, and a group of any size, and a prompt of any length, can be
trained beside requests: the least unit is one layer of one micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

_AIM = 0.75
"""Of the budget: as much noise as the rest does not overrun it."""
_BEGUN_WITHIN = 0.5
"""Of a unit, as long as it aims to be: later than that, what is new waits for the next one."""
_FOLLOW = 0.5
"""Weight of the newest stage in the running time of its kind."""


class Kind(Enum):
    """What a stage computes; the value: layers that it is taken to cost before one was measured."""

    FORWARD = 1.0
    HEAD = 8.0
    TURN = 20.0
    BACKWARD = 3.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Lazy arrays that are evaluated together, once those of the stages before it are."""

    kind: Kind
    arrays: object


class Pacer:
    """Runs stages one after the other, as many in a unit as its budget is measured to hold; one at least.

    Times are kept by kind of stage, for each token of a micro-batch.
    """

    def __init__(self, budget: float = 0.5) -> None:
        self.budget = budget
        self._each: dict[Kind, float] = {}
        self._began = 0.0
        self._empty = True

    def begin(self) -> None:
        """A unit begins now."""
        self._began, self._empty = time.monotonic(), True

    @property
    def has_room(self) -> bool:
        """Whether the unit has time to begin with something new."""
        return time.monotonic() - self._began <= _BEGUN_WITHIN * _AIM * self.budget

    def run(self, stages: Iterable[Stage], tokens: int) -> Iterator[None]:
        """Evaluates them, of a micro-batch of so many tokens; yields where another unit is to go on."""
        for stage in stages:
            if not self._fits(stage.kind, tokens):
                yield
            started = time.monotonic()
            mx.eval(stage.arrays)
            self._observe(stage.kind, (time.monotonic() - started) / tokens)
            self._empty = False

    def _fits(self, kind: Kind, tokens: int) -> bool:
        spent = time.monotonic() - self._began
        return self._empty or spent + self._expected(kind) * tokens <= _AIM * self.budget

    def _expected(self, kind: Kind) -> float:
        """Seconds a token; 0 while no layer was ever measured."""
        layer = self._each.get(Kind.FORWARD, 0.0)
        return self._each.get(kind, kind.value * layer)

    def _observe(self, kind: Kind, each: float) -> None:
        known = self._each.get(kind)
        self._each[kind] = each if known is None else known + _FOLLOW * (each - known)
