"""Runs prefill chunks and decode steps for live sequences.

Each decode step is launched before the tokens of the step before it are read. If a row ends at step k, it may have one
more token in flight, which is discarded. If a row has a grammar, step k's tokens are read while step k+1's forward
runs, and step k+1's logits are masked before its tokens are drawn.

On a CPU, the call that launches a step computes most of it. Launching ahead would gain nothing and deliver every token
one step later, so there each step is read before the next one is launched (`lookahead` False).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlx_parallm.batch.runner import BatchRunner, Step
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.core import SequenceStatus
from mlx_parallm.engine.live import LiveRequest, LiveSequence
from mlx_parallm.engine.requests import LiveRequests
from mlx_parallm.scheduler.scheduler import RLAwareScheduler
from mlx_parallm.scheduler.units import DecodeUnit, PrefillPart, PrefillUnit


class Prefiller:
    """Computes the keys and values of prompt chunks. Device thread only; raises what the device raises."""

    def __init__(self, runner: BatchRunner, requests: LiveRequests, scheduler: RLAwareScheduler) -> None:
        self._runner = runner
        self._requests = requests
        self._scheduler = scheduler

    def run(self, unit: PrefillUnit) -> None:
        """Computes the chunks of one unit. A scored prompt is alone in its unit, and its logprobs are computed too."""
        started = time.monotonic()
        with self._requests.scope.covering(self._requests.live(part.sequence).request for part in unit.parts):
            if unit.parts[0].sequence.scored:
                self._score(unit.parts[0])
            else:
                self._runner.prefill([self._chunk(part) for part in unit.parts])
        now = time.monotonic()
        self._requests.counters.prefilled_tokens += unit.tokens
        self._scheduler.record_prefill(unit, now - started, now)
        for part in unit.parts:
            if part.sequence.to_prefill == 0:
                self._requests.prefilled(self._requests.live(part.sequence))

    def _score(self, part: PrefillPart) -> None:
        live = self._requests.live(part.sequence)
        row, chunk = self._chunk(part)
        tokens, start = part.sequence.tokens, part.sequence.computed
        assert live.scores is not None
        del live.scores[start + 1 :]  # a preempted prompt is scored again from its start
        targets = tokens[start + 1 : start + part.tokens + 1]
        live.scores += self._runner.score(row, chunk, targets, live.request.request.prompt_logprobs or 0)

    def _chunk(self, part: PrefillPart) -> tuple[KVRow, list[int]]:
        row, start = self._requests.live(part.sequence).row, part.sequence.computed
        assert row is not None
        return row.kv, part.sequence.tokens[start : start + part.tokens]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step, and the live sequence of each of its rows, in the same order."""

    step: Step
    lives: tuple[LiveSequence, ...]

    @property
    def requests(self) -> set[LiveRequest]:
        return {live.request for live in self.lives if live.sequence.status is not SequenceStatus.FINISHED}


class Decoder:
    """Launches decode steps and reads their tokens. Device thread only; raises what the device raises.

    Args:
        lookahead: launch each step before the tokens of the step before it are read.
    """

    def __init__(
        self, runner: BatchRunner, requests: LiveRequests, scheduler: RLAwareScheduler, lookahead: bool
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._scheduler = scheduler
        self._lookahead = lookahead
        self._in_flight: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def run(self, unit: DecodeUnit) -> None:
        """Launches one step and reads the one before it."""
        launched = self._launch(unit)
        follows = self.in_flight
        self.commit()
        self._in_flight = launched  # set last, so that this step is dropped if reading the one before it fails
        if not follows and (unit.delayed or not self._lookahead):
            self.commit()  # else waiting work, or these tokens, would wait for another step

    def commit(self) -> None:
        """Reads the step in flight, if there is one, and gives its tokens to their sequences."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._read(in_flight)

    def drop(self) -> set[LiveRequest]:
        """Forgets the step in flight. Returns the requests that have rows in it."""
        in_flight, self._in_flight = self._in_flight, None
        return set() if in_flight is None else in_flight.requests

    def _launch(self, unit: DecodeUnit) -> _InFlight:
        lives = {id(live.row): live for live in map(self._requests.live, unit.sequences)}
        with self._requests.scope.covering(live.request for live in lives.values()):
            rows = [live.row for live in lives.values() if live.row is not None]
            pending = self._runner.begin(rows, self._in_flight.step if self._in_flight else None)
            self._scheduler.record_launch(unit, time.monotonic())
            if pending.needs_previous_tokens:
                self.commit()
            step = self._runner.draw(pending)
        self._requests.counters.steps += 1
        return _InFlight(step, tuple(lives[id(row)] for row in step.rows))

    def _read(self, in_flight: _InFlight) -> None:
        with self._requests.scope.covering(in_flight.requests):
            draws = self._runner.read(in_flight.step)
        now = time.monotonic()
        for live, draw in zip(in_flight.lives, draws, strict=True):
            if live.sequence.status is not SequenceStatus.FINISHED:
                self._requests.accept(live, draw, now)
