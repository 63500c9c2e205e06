"""Runs forward units for live sequences.

    host      build k+1 ─ wait ─ launch k+1 ─ give the tokens of k to their sequences, schedule, build k+2 ─ wait ─ ...
    device    k ─────────────┘              └ k+1 ───────────────────────────────────────────────────────────┘

A unit is built while the one before it runs. It is launched when that one has ended, and before its tokens are read,
but not earlier, because it would copy the KV pool (see `runner`). If a row ends at one unit, it may have one more token
in flight, which is discarded. If a row has a grammar, the tokens of unit k are read while the forward pass of unit k+1
runs, and its logits are masked before its tokens are sampled.

On a CPU, the call that launches a unit computes most of it. Launching ahead would gain nothing and deliver every token
one unit later, so there each unit is read before the next one is built (`lookahead` False).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.readback import Draw
from mlx_parallm.batch.runner import BatchRunner, Launched, Pending
from mlx_parallm.core import DeviceSeconds, SequenceStatus
from mlx_parallm.engine.live import LiveRequest, LiveSequence, live
from mlx_parallm.engine.memory import PoolMemory
from mlx_parallm.engine.requests import LiveRequests
from mlx_parallm.engine.speculation.drafting import compare, plan_draft
from mlx_parallm.scheduler.scheduler import RLAwareScheduler
from mlx_parallm.scheduler.units import ForwardUnit


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched unit and the time of its launch, or of its end once it has ended."""

    unit: ForwardUnit
    launched: Launched
    at: float

    @property
    def requests(self) -> set[LiveRequest]:
        rows = (live(span.sequence) for span in self.unit.spans)
        return {row.request for row in rows if row.status is not SequenceStatus.FINISHED}


class Forwards:
    """Launches forward units and reads their tokens. Device thread only; raises what the device raises.

    Args:
        lookahead: build each unit while the unit before it runs, and launch it before the tokens of that one are read,
            unless it has drafts.
    """

    def __init__(
        self,
        runner: BatchRunner,
        requests: LiveRequests,
        scheduler: RLAwareScheduler,
        memory: PoolMemory,
        lookahead: bool,
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._scheduler = scheduler
        self._memory = memory
        self._lookahead = lookahead
        self._in_flight: _InFlight | None = None
        self._ended: _InFlight | None = None  # its tokens are not read yet
        self._ended_at = 0.0  # when the last unit ended

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def run(self, unit: ForwardUnit) -> None:
        """Launches one unit, and reads the one before it."""
        started = time.monotonic()
        try:
            pending = self._begin(unit, started)
            self._wait()
            launched = self._launch(unit, pending, started)
        finally:
            self._read()  # the unit before has ended, and is read even if this one fails
        self._in_flight = launched  # set last, so that this unit is dropped if reading the one before it fails
        if unit.drafts or unit.delayed or not self._lookahead:
            self.commit()  # else waiting work, or these tokens, would wait for another unit

    def commit(self) -> None:
        """Waits for the unit in flight, if there is one, and gives its tokens to their sequences."""
        self._wait()
        self._read()

    def drop(self) -> set[LiveRequest]:
        """Forgets the unit in flight. Returns the requests that have rows in it."""
        in_flight, self._in_flight = self._in_flight, None
        return set() if in_flight is None else in_flight.requests

    def _begin(self, unit: ForwardUnit, now: float) -> Pending:
        """Builds a unit."""
        spans = [Span(live(span.sequence), span.start, span.tokens) for span in unit.spans]
        before = self._in_flight or self._ended
        draws = [live(sequence) for sequence in unit.draws]
        rows = [span.row for span in spans]
        for span in spans:
            plan_draft(span.row, self._requests.scope)
            self._memory.reserve_checkpoint(span.row, span.stop)
        with self._requests.scope.covering({row.request for row in rows}):
            pending = self._runner.begin(spans, draws, before.launched if before else None)
            self._scheduler.record_launch(unit, now)
            self._requests.started(rows)
        return pending

    def _launch(self, unit: ForwardUnit, pending: Pending, started: float) -> _InFlight:
        with self._requests.scope.covering({live(span.sequence).request for span in unit.spans}):
            if pending.needs_previous_tokens:
                self._runner.launch(pending)
                self._read()
            launched = self._runner.draw(pending)
        self._requests.counters.steps += bool(unit.draws)
        self._requests.counters.prefilled_tokens += sum(chunk.tokens for chunk in unit.chunks)
        return _InFlight(unit, launched, started)

    def _wait(self) -> None:
        """Waits for the unit in flight, if there is one."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        with self._requests.scope.covering(in_flight.requests):
            self._runner.wait()
        now = time.monotonic()
        seconds = now - max(in_flight.at, self._ended_at)
        prefill = seconds * self._scheduler.prefill_share(in_flight.unit)
        self._requests.counters.add_seconds(DeviceSeconds(decode=seconds - prefill, prefill=prefill))
        self._scheduler.record_done(in_flight.unit, seconds, now)
        self._ended, self._ended_at = replace(in_flight, at=now), now

    def _read(self) -> None:
        """Gives the tokens of the unit that has ended, if there is one, to their sequences."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        launched = ended.launched
        with self._requests.scope.covering(ended.requests):
            draws = self._runner.read(launched)
            scores = [(live(row), start, part.read()) for row, start, part in launched.scores]
            pooled = launched.pooled.read() if launched.pooled else []
        for row, start, part in scores:
            self._requests.add_scores(row, start, part)
        for part_of, vector in pooled:
            self._requests.add_pooled(live(part_of.row), part_of.start, part_of.stop, vector)
        for row, of_row in groupby(zip(launched.rows, draws, strict=True), key=itemgetter(0)):
            self._accept(live(row), [draw for _, draw in of_row], ended.at)
        for span in ended.unit.spans:
            self._after(live(span.sequence), span.start + span.tokens)

    def _accept(self, row: LiveSequence, draws: Sequence[Draw], now: float) -> None:
        """Gives a row its draws, up to the first one that differs from the guess after which the next one was drawn.

        At each moment the row is as if its tokens had come one by one, because any of them may end it.
        """
        guess, row.guess, row.drafted, row.draft_sampling = row.guess, (), 0, ()
        counters, source = self._requests.counters, "" if row.guesses is None else row.guesses.source.value
        if len(draws) > 1:
            counters.drafted[source] += len(draws) - 1
        row.take_back(len(draws) - 1)
        for place, draw in enumerate(draws):
            if row.status is SequenceStatus.FINISHED:
                return
            if place:
                row.take_guessed()
                counters.accepted[source] += 1
            self._requests.accept(row, draw, now)
            if place == len(guess) or not compare(row, guess[place], draw.token):
                break
        if len(draws) > 1:
            row.count_again()

    def _after(self, row: LiveSequence, computed: int) -> None:
        """Registers the full blocks of a row, after the unit that brought it to `computed` tokens was read. Ends a
        sequence whose prompt is computed and that draws no token. Does nothing if the sequence has ended or was
        preempted meanwhile."""
        if row.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING):
            self._memory.keep(row)
            if row.max_tokens == 0 and row.to_compute == 0 and row.computed == computed:
                self._requests.prefilled(row)
