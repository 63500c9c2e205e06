"""Decode steps: each is launched before the tokens of the one before are read.

A row that ends at step k may have one more token in flight, which is thrown away. Where a row has a grammar, step k's
tokens are read while step k+1's forward runs, and masked before anything is drawn from it. On a CPU launching waits for
most of the step, so launching ahead would gain nothing and deliver every token a step later: there each step is read
before the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlx_parallm.batch.runner import BatchRunner, Step
from mlx_parallm.engine.ledger import Ledger
from mlx_parallm.engine.live import LiveRequest, LiveSequence
from mlx_parallm.scheduler.rl_aware import RLAwareScheduler
from mlx_parallm.scheduler.sequence import Status
from mlx_parallm.scheduler.units import DecodeUnit


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step and the live sequence of each of its rows, in the step's order."""

    step: Step
    lives: tuple[LiveSequence, ...]

    @property
    def requests(self) -> set[LiveRequest]:
        return {live.request for live in self.lives if live.sequence.status is not Status.FINISHED}


class Decoder:
    """Owns the step in flight. Every method runs on the device thread; they raise whatever the device raises.

    `lookahead`: a decode step is launched before the tokens of the one before are read.
    """

    def __init__(self, runner: BatchRunner, ledger: Ledger, scheduler: RLAwareScheduler, lookahead: bool) -> None:
        self._runner = runner
        self._ledger = ledger
        self._scheduler = scheduler
        self._lookahead = lookahead
        self._in_flight: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def run(self, unit: DecodeUnit) -> None:
        """Launches one step, and reads the one before."""
        launched = self._launch(unit)
        follows = self.in_flight
        self.commit()
        self._in_flight = launched  # only once the step that it builds on could be read
        if not follows and (unit.awaited or not self._lookahead):
            self.commit()  # now: else waiting work would wait for the next step too

    def commit(self) -> None:
        """Reads the step in flight, if there is one, and hands out its tokens."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._read(in_flight)

    def drop(self) -> set[LiveRequest]:
        """Forgets the step in flight; returns the requests that had rows in it."""
        in_flight, self._in_flight = self._in_flight, None
        return set() if in_flight is None else in_flight.requests

    def _launch(self, unit: DecodeUnit) -> _InFlight:
        lives = {id(live.row): live for live in map(self._ledger.live, unit.sequences)}
        with self._ledger.blame.on(live.request for live in lives.values()):
            rows = [live.row for live in lives.values() if live.row is not None]
            undrawn = self._runner.begin(rows, self._in_flight.step if self._in_flight else None)
            self._scheduler.launched(unit, time.monotonic())
            if undrawn.waits:
                self.commit()
            step = self._runner.draw(undrawn)
        self._ledger.counters.steps += 1
        return _InFlight(step, tuple(lives[id(row)] for row in step.rows))

    def _read(self, in_flight: _InFlight) -> None:
        with self._ledger.blame.on(in_flight.requests):
            draws = self._runner.read(in_flight.step)
        now = time.monotonic()
        for live, draw in zip(in_flight.lives, draws, strict=True):
            if live.sequence.status is not Status.FINISHED:
                self._ledger.accept(live, draw, now)
