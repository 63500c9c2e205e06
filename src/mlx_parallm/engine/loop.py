"""What the device thread does, one unit at a time: schedule → run → commit → publish.

A decode step may be in flight between two units (`decoding.py`). Anything else (a prefill chunk, staging an adapter, a
unit of training, idling) first commits it. Whatever a unit raises is caught in one place: `surviving`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.adapters.wants import Told
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core import DeviceSchedule, EngineStats, GenerationRequest, PauseMode, TrainingWork
from mlx_parallm.engine import prefilling
from mlx_parallm.engine.blame import Blame
from mlx_parallm.engine.decoding import Decoder
from mlx_parallm.engine.faults import Recovery
from mlx_parallm.engine.ledger import Ledger, Publish
from mlx_parallm.engine.live import LiveRequest, LiveSequence, Vocabulary
from mlx_parallm.engine.memory import PoolMemory
from mlx_parallm.engine.snapshot import snapshot
from mlx_parallm.errors import AbortedError, ContextLengthError
from mlx_parallm.model.limits import MemoryLimits
from mlx_parallm.scheduler.cost import CostModel
from mlx_parallm.scheduler.rl_aware import RLAwareScheduler, SchedulerConfig
from mlx_parallm.scheduler.units import DecodeUnit, PrefillUnit, StagingUnit, TrainingUnit


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the device thread builds before it serves. `training` None: this server does not train.

    `queue_timeout_s`: how long a request may wait until the device begins with it; None: any time.
    `limits`: what was set of MLX's memory, for `/debug/state`.
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
    limits: MemoryLimits | None = None


class DeviceLoop:
    """Owns scheduler, runner and live requests. Every method runs on the device thread."""

    def __init__(self, parts: EngineParts, publish: Publish) -> None:
        lives: dict[int, LiveSequence] = {}
        self._blame = blame = Blame()
        memory = PoolMemory(parts.runner.cache, parts.adapters, lives, blame)
        self._runner = parts.runner
        self._adapters = parts.adapters
        self._training = parts.training
        self._queue_timeout_s = parts.queue_timeout_s
        self._limits = parts.limits
        self._scheduler = scheduler = RLAwareScheduler(parts.scheduler, memory, parts.cost)
        self._ledger = ledger = Ledger(lives, blame, parts.vocabulary, scheduler, parts.adapters, publish)
        self.counters = ledger.counters
        self._decoder = decoder = Decoder(parts.runner, ledger, scheduler, parts.lookahead)
        self._recovery = Recovery(parts.runner, decoder, ledger, scheduler, parts.adapters, parts.training)

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Shares the device like this from the next unit on."""
        self._scheduler.reschedule(schedule)

    def add_wait_time(self, seconds: float) -> None:
        """Rows have waited so long for what others had done on this thread between two units."""
        self._scheduler.add_wait_time(seconds)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. One that can never fit in the pool fails at once, as one that cannot be read does."""
        with self.surviving():
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
        with self.surviving():
            self._ledger.abort(request_id)

    def settle(self) -> None:
        """Reads the step in flight: what is run on the device thread next raises its own errors only."""
        with self.surviving():
            self._decoder.commit()
            self._ledger.flush()

    def pause(self, mode: PauseMode) -> None:
        """Requests that come from now on wait for `resume`; those that are here go by the mode."""
        self._scheduler.pause(freeze=mode is PauseMode.KEEP)
        if mode is PauseMode.WAIT:
            return
        self.settle()  # what is drawn is told
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
        busy = True
        with self.surviving():
            busy = self._step()
            self._recovery.went_well()
        return busy

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Every call into MLX is made in such a block: what it raises costs what `Recovery` says, not the thread.

        Raises:
            DeviceLostError: the device fails whatever it is given.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the device raises what it likes, at any call; one client's fault must not end all
            self._recovery.survive(error)

    def _step(self) -> bool:
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
            self._decoder.run(unit)
        elif self._decoder.in_flight:
            self._decoder.commit()  # the scheduler decides again, knowing what was drawn
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

    # -- prefill ---------------------------------------------------------------------------------

    def _prefill(self, unit: PrefillUnit) -> None:
        started = time.monotonic()
        with self._blame.on(self._ledger.live(part.sequence).request for part in unit.parts):
            prefilling.run(unit, self._runner, self._ledger)
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
        with self._blame.on(work=self._adapters):
            self._adapters.advance()
            while time.monotonic() - started < unit.seconds and moves.staged == staged and self._adapters.waits():
                self._adapters.advance()
        self._scheduler.staged(time.monotonic() - started)

    def _bytes_beside(self) -> int:
        """What adapters and training hold of the memory that the KV pool shares with them."""
        return self._adapters.bytes_held + (self._training.bytes_held if self._training is not None else 0)

    def _training_waits(self) -> bool:
        return self._training is not None and self._training.waits()

    def _train(self, unit: TrainingUnit) -> None:
        """One unit of an update; its time counts, failed or not."""
        assert self._training is not None
        started = time.monotonic()
        try:
            with self._blame.on(work=self._training):
                self._training.pace(unit.seconds)
                self._training.advance()
        finally:
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

    # -- books -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        peak = mx.get_peak_memory() if self._training is None else self._training.peak_bytes
        return snapshot(self.counters, self._scheduler, self._runner.cache, self._ledger.lives(), peak, self._limits)

    def check_integrity(self) -> None:
        """Raises AssertionError when scheduler, pool, slots and live requests do not agree."""
        self._scheduler.check_integrity()
        self._runner.cache.check_integrity()
        self._adapters.check_integrity()
        self._ledger.check_integrity()
        rows = {id(live.row.kv): live.row.kv for live in self._ledger.lives() if live.row is not None}
        assert set(rows) == {id(row) for row in self._runner.cache.rows()}
        assert self._adapters.slots.pinned == len({row.adapter_slot for row in rows.values()} - {0})
