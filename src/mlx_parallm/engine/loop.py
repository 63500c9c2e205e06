"""What the device thread does, one unit at a time: schedule → run → commit → publish.

Decode is pipelined: step k+1 is launched before step k's tokens are read, so a row that ends at step
k may have one more token in flight; it is thrown away. Where a row has a grammar, step k's tokens are read while step
k+1's forward runs, and masked before anything is drawn from it. Anything else (a prefill chunk, staging an adapter,
a unit of training, idling) first commits the step in flight. On a CPU launching waits for most of the step, so that
launching ahead would gain nothing and tell every token a step later: there each step is read before the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.adapters.wants import Told
from mlx_parallm.batch.runner import BatchRunner, Row, Step, Undrawn
from mlx_parallm.core import DeviceSchedule, EngineStats, GenerationRequest, PauseMode, TrainingWork
from mlx_parallm.engine import prefilling
from mlx_parallm.engine.ledger import Ledger, Publish
from mlx_parallm.engine.live import LiveRequest, LiveSequence, Vocabulary
from mlx_parallm.engine.memory import PoolMemory
from mlx_parallm.engine.snapshot import snapshot
from mlx_parallm.errors import AbortedError, ContextLengthError, StepFailedError
from mlx_parallm.scheduler.cost import CostModel
from mlx_parallm.scheduler.rl_aware import RLAwareScheduler, SchedulerConfig
from mlx_parallm.scheduler.sequence import Status
from mlx_parallm.scheduler.units import DecodeUnit, PrefillUnit, StagingUnit, TrainingUnit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the device thread builds before it serves. `training` None: this server does not train.

    `queue_timeout_s`: how long a request may wait until the device begins with it; None: any time.
    `lookahead`: a decode step is launched before the tokens of the one before are read.
    """

    runner: BatchRunner
    adapters: AdapterStore
    vocabulary: Vocabulary
    scheduler: SchedulerConfig
    cost: CostModel
    training: TrainingWork | None = None
    lookahead: bool = True
    queue_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step and the live sequence of each of its rows, in the step's order."""

    step: Step
    lives: tuple[LiveSequence, ...]


class DeviceLoop:
    """Owns scheduler, runner and live requests. Every method runs on the device thread."""

    def __init__(self, parts: EngineParts, publish: Publish) -> None:
        lives: dict[int, LiveSequence] = {}
        memory = PoolMemory(parts.runner.cache, parts.adapters, lives)
        self._runner = parts.runner
        self._adapters = parts.adapters
        self._training = parts.training
        self._lookahead = parts.lookahead
        self._queue_timeout_s = parts.queue_timeout_s
        self._vocab_size = parts.vocabulary.size
        self._scheduler = RLAwareScheduler(parts.scheduler, memory, parts.cost)
        self._ledger = Ledger(lives, parts.vocabulary, self._scheduler, parts.adapters, publish)
        self.counters = self._ledger.counters
        self._in_flight: _InFlight | None = None

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Shares the device like this from the next unit on."""
        self._scheduler.reschedule(schedule)

    def add_wait_time(self, seconds: float) -> None:
        """Rows have waited so long for what others had done on this thread between two units."""
        self._scheduler.add_wait_time(seconds)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. One that can never fit in the pool fails at once."""
        live = self._ledger.open(request)
        self._refuse_oversized(live)
        for sequence in tuple(live.unfinished):
            self._ledger.finish_if_nothing_to_do(sequence)
        self._ledger.flush()

    def fail_overdue(self, now: float) -> None:
        """Fails requests that have waited in the queue for too long."""
        if self._queue_timeout_s is not None:
            self._ledger.fail_overdue(now - self._queue_timeout_s)
            self._ledger.flush()

    def abort(self, request_id: str) -> None:
        """Frees everything a request holds. Nothing is published: nobody listens any more."""
        self._ledger.abort(request_id)

    def pause(self, mode: PauseMode) -> None:
        """Requests that come from now on wait for `resume`; those that are here go by the mode."""
        self._scheduler.pause(freeze=mode is PauseMode.KEEP)
        if mode is PauseMode.WAIT:
            return
        self._commit()  # what is drawn is told
        if mode is PauseMode.ABORT:
            self._ledger.fail_all(AbortedError("the server was paused"))
        self._ledger.flush()

    def resume(self) -> None:
        """Ends a pause."""
        self._scheduler.resume()

    def vacate(self, told: Told) -> None:
        """Gives the adapters' slots back, beside whatever else there is to do; see `AdapterStore.vacate`."""
        self._adapters.vacate(told)

    def _refuse_oversized(self, live: LiveRequest) -> None:
        longest = max(map(len, live.request.prompts)) + live.request.stopping.max_tokens
        cache = self._runner.cache
        if not cache.can_ever_hold(longest):
            message = (
                f"prompt and max_tokens need {longest} tokens of KV memory, the server has room for "
                f"{min(cache.max_length, cache.budget_tokens)}; shorten them or raise --kv-cache-memory"
            )
            self._ledger.fail(live, ContextLengthError(message))

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs the next unit of device work; False when there was none."""
        started = time.monotonic()
        self._fail_without_adapter()
        self._runner.cache.reserve(self._bytes_beside())
        self._scheduler.admit()
        admitted = time.monotonic()
        self._scheduler.add_wait_time(admitted - started)
        unit = self._scheduler.next_unit(
            admitted, self._adapters.waits(), self._training_waits(), self._adapters.urgent
        )
        if isinstance(unit, DecodeUnit):
            self._decode(unit)
        elif self._in_flight is not None:
            self._commit()  # the scheduler decides again, knowing what was drawn
        elif isinstance(unit, PrefillUnit):
            self._prefill(unit)
        elif isinstance(unit, StagingUnit):
            self._stage(unit)
        elif isinstance(unit, TrainingUnit):
            self._train(unit)
        else:
            return False
        self._ledger.flush()
        return True

    def _decode(self, unit: DecodeUnit) -> None:
        lives = {id(live.row): live for live in map(self._ledger.live, unit.sequences)}
        rows = [live.row for live in lives.values() if live.row is not None]
        undrawn = self._begin(rows, lives.values())
        if undrawn is None:
            return
        self._scheduler.launched(unit, time.monotonic())
        if undrawn.waits and not self._commit():
            return
        step = self._draw(undrawn, lives.values())
        if step is None:
            return
        self.counters.steps += 1
        previous, self._in_flight = self._in_flight, _InFlight(step, tuple(lives[id(row)] for row in step.rows))
        if previous is not None:
            self._read(previous)
        elif unit.awaited or not self._lookahead:
            self._commit()  # at once: else whoever waits would wait for the next step too

    def _begin(self, rows: Sequence[Row], lives: Iterable[LiveSequence]) -> Undrawn | None:
        try:
            return self._runner.begin(rows, self._in_flight.step if self._in_flight else None)
        except Exception as error:  # noqa: BLE001 - whatever the forward raises costs the rows of this step, not the thread
            self._commit()
            self._recover(lives, error)
            return None

    def _draw(self, undrawn: Undrawn, lives: Iterable[LiveSequence]) -> Step | None:
        try:
            return self._runner.draw(undrawn)
        except Exception as error:  # noqa: BLE001 - the same of what the sampler raises
            self._commit()
            self._recover(lives, error)
            return None

    def _commit(self) -> bool:
        """Reads the step in flight, if there is one. False: it had failed, and every row was taken back."""
        step, self._in_flight = self._in_flight, None
        return step is None or self._read(step)

    def _read(self, in_flight: _InFlight) -> bool:
        try:
            draws = self._runner.read(in_flight.step)
        except Exception as error:  # noqa: BLE001 - a lazy step fails where it is read: it costs its own rows
            self._recover(in_flight.lives, error)
            return False
        now = time.monotonic()
        for live, draw in zip(in_flight.lives, draws, strict=True):
            if live.sequence.status is not Status.FINISHED:
                self._ledger.accept(live, draw, now)
        return True

    # -- prefill ---------------------------------------------------------------------------------

    def _prefill(self, unit: PrefillUnit) -> None:
        started = time.monotonic()
        try:
            prefilling.run(unit, self._runner, self._ledger)
        except Exception as error:  # noqa: BLE001 - whatever the forward raises costs this unit's requests, not the thread
            self._recover([self._ledger.live(part.sequence) for part in unit.parts], error)
            return
        now = time.monotonic()
        self.counters.prefilled_tokens += unit.tokens
        self._scheduler.prefilled(unit, now - started, now)
        for part in unit.parts:
            if part.sequence.to_prefill == 0:
                self._ledger.prefilled(self._ledger.live(part.sequence))

    # -- work beside requests --------------------------------------------------------------------

    def _stage(self, unit: StagingUnit) -> None:
        """Ends with the version that it brings: rows are admitted to it before the next one looks for a slot, or two
        that wait for the only free slot would be staged over each other for ever."""
        moves, started = self._adapters.moves, time.monotonic()
        staged = moves.staged
        try:
            self._adapters.advance()
            while time.monotonic() - started < unit.seconds and moves.staged == staged and self._adapters.waits():
                self._adapters.advance()
        except Exception as error:  # noqa: BLE001 - a failed write costs what is on the device, not the thread
            self._recover((), error)
            self._adapters.reset()
        self._scheduler.staged(time.monotonic() - started)

    def _bytes_beside(self) -> int:
        """What adapters and training hold of the memory that the KV pool shares with them."""
        return self._adapters.bytes_held + (self._training.bytes_held if self._training is not None else 0)

    def _training_waits(self) -> bool:
        return self._training is not None and self._training.waits()

    def _train(self, unit: TrainingUnit) -> None:
        """One unit of an update. A failed one costs its update and no row: it writes arrays of its own, reads the
        model's, and evaluates none of the pool's, so those are as they were and nothing is recomputed."""
        assert self._training is not None
        started = time.monotonic()
        self._training.pace(unit.seconds)
        try:
            self._training.advance()
        except Exception as error:  # noqa: BLE001 - a failed unit costs its update, not the thread
            _log.error("a unit of training failed", exc_info=error)
            self.counters.failed_training_units += 1
            self._training.reset()
        now = time.monotonic()
        self.counters.training_units += 1
        self.counters.training_seconds += now - started
        self._scheduler.trained(now - started, now)

    # -- faults ----------------------------------------------------------------------------------

    def _fail_without_adapter(self) -> None:
        """Requests whose adapter cannot be brought to the device fail; they hold no row."""
        for ref, error in self._adapters.take_failures().items():
            for request in self._ledger.of_adapter(ref):
                self._ledger.fail(request, error)
        self._ledger.flush()

    def _recover(self, guilty: Iterable[LiveSequence], error: Exception) -> None:
        """After a failed unit: its requests fail, every other row is recomputed on fresh arrays.

        Arrays that a failed step was to write cannot be trusted, nor can those that share a slab with them.
        """
        _log.error("a unit of device work failed", exc_info=error)
        self.counters.failed_steps += 1
        self._in_flight = None
        for request in {live.request for live in guilty if live.sequence.status is not Status.FINISHED}:
            message = f"the model failed while computing this request: {type(error).__name__}"
            self._ledger.fail(request, StepFailedError(message))
        for sequence in self._scheduler.live:
            self._scheduler.preempt(sequence)
        for live in self._ledger.lives():
            live.forget_unread(self._vocab_size)
        self._runner.cache.clear()

    # -- books -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        peak = mx.get_peak_memory() if self._training is None else self._training.peak_bytes
        return snapshot(self.counters, self._scheduler, self._runner.cache, self._ledger.lives(), peak)

    def check_integrity(self) -> None:
        """Raises AssertionError when scheduler, pool, slots and live requests do not agree."""
        self._scheduler.check_integrity()
        self._runner.cache.check_integrity()
        self._adapters.check_integrity()
        self._ledger.check_integrity()
        rows = {id(live.row.kv): live.row.kv for live in self._ledger.lives() if live.row is not None}
        assert set(rows) == {id(row) for row in self._runner.cache.rows()}
        assert self._adapters.slots.pinned == len({row.adapter_slot for row in rows.values()} - {0})
