"""Pacer: how a pass is cut into units of device work that keep to a latency budget.

    forward, layer by layer ─▶ head: losses, block by block ─▶ head backward ─▶ backward, layer by layer
    └────── unit ──────┘└──────── unit ────────┘└────────── unit ──────────┘└──────── unit ────────┘

A micro-step is one lazy graph. Units only decide when its stages are computed, never what is computed, so an update is
the same to the bit however it was cut. The smallest unit is one layer, or one block of positions of the head, of one
micro-step, so groups of any size and prompts of any length can be trained beside requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

_TARGET = 0.75
"""Fraction of the budget that a unit aims at; the rest absorbs noise in the measured times."""

_LATEST_START = 0.5
"""Fraction of that target after which no new job is begun in the unit."""

_TOGETHER = 0.5
"""Fraction of what is left of that target that stages may be expected to take which are waited for together."""

_NEWEST = 0.5
"""Weight of the newest measurement in the running mean of a stage kind's time."""

_MEASURED_PASSES = 16
"""Passes whose memory is remembered."""


class StageKind(Enum):
    """What a stage computes. The value is its cost relative to the forward pass of one layer, which is used until a
    stage of this kind has been measured."""

    FORWARD = 1.0
    HEAD = 8.0
    HEAD_BACKWARD = 20.0
    BACKWARD = 3.0
    VALUES = 0.5  # one of each row, in place of the head's logits
    VALUES_BACKWARD = 1.5
    OPTIMIZER = 1e-4


@dataclass(frozen=True, slots=True)
class Stage:
    """Lazy arrays (any tree) that are computed together, after the arrays of the stages before it.

    `size`: how many positions of the head, rows or values of factors it computes; None if it computes something for
    every token of the pass.
    """

    kind: StageKind
    arrays: object
    size: int | None = None

    def launch(self) -> None:
        """Begins to compute the arrays."""
        mx.async_eval(self.arrays)  # type: ignore[no-untyped-call]


class Pacer:
    """Computes the stages of passes in order: in each unit as many as its budget is expected to hold, and at least one.
    Measures their time and their memory. Device thread only, except `peak_bytes`.

    Waiting for the device after each stage would leave a GPU idle while the next one is launched. So stages of one kind
    are launched together and waited for once, as many as are expected to take half of what is left of the unit. MLX
    computes them one after the other and does not run far ahead of the device, so they take no more memory than alone.

    Expected times are kept for each kind of stage: per token of a micro-batch, or whatever else is its size. `budget`:
    seconds.
    """

    def __init__(self, budget: float = 0.5) -> None:
        self.budget = budget
        self._seconds_per_size: dict[StageKind, float] = {}
        self._began = 0.0
        self._empty = True
        self._kept = self._most = 0  # of the pass that runs
        self._passes = deque([(0, 0)], maxlen=_MEASURED_PASSES)  # the most bytes of each, and what it left allocated
        self._peak_bytes = 0

    def begin(self) -> None:
        """Starts a unit."""
        self._began, self._empty = time.monotonic(), True

    @property
    def has_room(self) -> bool:
        """Whether there is time to begin another job in this unit."""
        return self._empty or self._elapsed <= _LATEST_START * _TARGET * self.budget

    @property
    def pass_bytes(self) -> int:
        """The most device memory that one of the last passes took, without what it left allocated."""
        return max(self._most, *(most - max(left, 0) for most, left in self._passes))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that MLX has held since the process started. Each measurement resets MLX's own counter."""
        return max(self._peak_bytes, mx.get_peak_memory())

    def run(self, stages: Iterable[Stage], tokens: int) -> Generator[None, None, None]:
        """Computes the stages of a pass over `tokens` tokens; yields whenever the next one needs a new unit."""
        try:
            waiting = deque(stages)
            while waiting:
                if not self._empty and self._elapsed + self._expected(waiting[0], tokens) > _TARGET * self.budget:
                    yield
                self._compute(self._together(waiting, tokens), tokens)
        finally:
            self._passes.append((self._most, self._kept))
            self._kept = self._most = 0

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _expected(self, stage: Stage, tokens: int) -> float:
        """Seconds that a stage is expected to take."""
        layer = self._seconds_per_size.get(StageKind.FORWARD, 0.0)
        return _size([stage], tokens) * self._seconds_per_size.get(stage.kind, stage.kind.value * layer)

    def _together(self, waiting: deque[Stage], tokens: int) -> Sequence[Stage]:
        """Takes the next stages that are waited for together: one, if its kind was never measured."""
        stages = [waiting.popleft()]
        kind, seconds = stages[0].kind, self._expected(stages[0], tokens)
        if kind not in self._seconds_per_size:
            return stages
        room = _TOGETHER * (_TARGET * self.budget - self._elapsed)
        while waiting and waiting[0].kind is kind and (seconds := seconds + self._expected(waiting[0], tokens)) <= room:
            stages.append(waiting.popleft())
        return stages

    def _compute(self, stages: Sequence[Stage], tokens: int) -> None:
        started = time.monotonic()
        with self._measured_memory():
            for stage in stages:
                stage.launch()
            mx.eval([stage.arrays for stage in stages])
        seconds = (time.monotonic() - started) / max(_size(stages, tokens), 1)
        before = self._seconds_per_size.setdefault(stages[0].kind, seconds)
        self._seconds_per_size[stages[0].kind] = before + _NEWEST * (seconds - before)
        self._empty = False

    @contextmanager
    def _measured_memory(self) -> Iterator[None]:
        """Adds what the block allocates to the memory of the pass. It resets MLX's counter of the peak."""
        self._peak_bytes = self.peak_bytes
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            yield
        finally:
            self._most = max(self._most, self._kept + mx.get_peak_memory() - before)
            self._kept += mx.get_active_memory() - before


def _size(stages: Sequence[Stage], tokens: int) -> int:
    return sum(tokens if stage.size is None else stage.size for stage in stages)
