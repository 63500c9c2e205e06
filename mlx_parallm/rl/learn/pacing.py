"""Cutting a micro-step into units of device work that keep to a latency budget, and the memory that it takes.

    forward, layer by layer ─▶ head: losses ─▶ head and top layer backward ─▶ backward, layer by layer
    └────── unit ──────┘└──────── unit ────────┘└────────── unit ──────────┘└──────── unit ────────┘

A micro-step is one lazy graph. Units only decide when its parts are computed, never what is computed, so an update is
the same to the bit however it was cut. The smallest unit is one layer, or the head, of one micro-step, so groups of any
size and prompts of any length can be trained beside requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

_TARGET = 0.75
"""Fraction of the budget that a unit aims at; the rest absorbs noise in the measured times."""

_LATEST_START = 0.5
"""Fraction of that target after which no new micro-step is begun in the unit."""

_NEWEST = 0.5
"""Weight of the newest stage in the running time of its kind."""

_MICRO_STEPS = 16
"""Micro-steps whose memory is remembered."""


class StageKind(Enum):
    """What a stage computes. The value is its expected cost, in layers, before one was measured."""

    FORWARD = 1.0
    HEAD = 8.0
    HEAD_BACKWARD = 20.0
    BACKWARD = 3.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Lazy arrays (any tree) that are evaluated together, after those of the stages before it."""

    kind: StageKind
    arrays: object


class Pacer:
    """Evaluates stages in order, as many per unit as its budget is expected to hold, and at least one.

    Expected times are kept by kind of stage, per token of a micro-batch. `budget`: seconds.
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
        """Whether there is time to begin another micro-step in this unit."""
        return time.monotonic() - self._began <= _LATEST_START * _TARGET * self.budget

    def run(self, stages: Iterable[Stage], tokens: int) -> Iterator[None]:
        """Evaluates the stages of a micro-batch of `tokens` tokens; yields whenever the next one needs a new unit."""
        for stage in stages:
            if not self._fits(stage.kind, tokens):
                yield
            started = time.monotonic()
            mx.eval(stage.arrays)
            self._observe(stage.kind, (time.monotonic() - started) / tokens)
            self._empty = False

    def _fits(self, kind: StageKind, tokens: int) -> bool:
        elapsed = time.monotonic() - self._began
        return self._empty or elapsed + self._expected(kind) * tokens <= _TARGET * self.budget

    def _expected(self, kind: StageKind) -> float:
        """Seconds per token; 0 until a layer was measured."""
        layer = self._seconds_per_token.get(StageKind.FORWARD, 0.0)
        return self._seconds_per_token.get(kind, kind.value * layer)

    def _observe(self, kind: StageKind, seconds: float) -> None:
        known = self._seconds_per_token.get(kind)
        self._seconds_per_token[kind] = seconds if known is None else known + _NEWEST * (seconds - known)


class MicroStepMemory:
    """Memory of micro-steps, in bytes. Device thread only, except `peak`. Measuring resets MLX's own peak counter.

    Other work uses the device between the units of a micro-step, so what each unit leaves allocated is added up.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._working: deque[int] = deque(maxlen=_MICRO_STEPS)
        self._left = self._most = 0  # of the current micro-step: allocated after its last unit, and the most so far

    @property
    def peak(self) -> int:
        """The most that MLX has held since the process started."""
        return max(self._peak, mx.get_peak_memory())

    @property
    def working(self) -> int:
        """The most that one of the last micro-steps, or the current one, held beyond what it leaves allocated."""
        return max(self._most, *self._working, 0)

    def begin(self) -> None:
        """Starts a micro-step."""
        self._left = self._most = 0

    def end(self) -> None:
        """Ends the micro-step, finished or given up."""
        self._working.append(max(self._most - max(self._left, 0), 0))
        self._most = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the unit of the micro-step that runs in the block."""
        self._peak = self.peak
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            yield
        finally:
            self._most = max(self._most, self._left + mx.get_peak_memory() - before)
            self._left += mx.get_active_memory() - before
