"""DeviceLoop runs the work of the device thread, one unit at a time: schedule → run → commit → publish.

A forward unit may be in flight while the next unit is chosen: it is launched, and its tokens are not read yet (see
`steps`). They are read before an adapter is staged or a part of a training micro-step runs. `DeviceLoop.surviving`
catches the errors of all units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import mlx.core as mx

from mlx_parallm.core import (
    DeviceSeconds,
    EngineStats,
    GenerationRequest,
    PauseMode,
    Relief,
    completed,
    then,
)
from mlx_parallm.engine.disk_prefixes import DiskPrefixes
from mlx_parallm.engine.faults import Recovery
from mlx_parallm.engine.live import FaultScope, live
from mlx_parallm.engine.memory import PoolMemory, open_accounts
from mlx_parallm.engine.parts import EngineParts
from mlx_parallm.engine.requests import LiveRequests, PublishEvents
from mlx_parallm.engine.speculation.drafting import Drafting
from mlx_parallm.engine.stats import snapshot
from mlx_parallm.engine.steps import Forwards
from mlx_parallm.engine.trace import UnitTrace
from mlx_parallm.errors import AbortedError, ContextLengthError, InvalidRequestError
from mlx_parallm.scheduler.scheduler import RLAwareScheduler
from mlx_parallm.scheduler.units import Candidate, ForwardUnit, StagingUnit, TrainingUnit, Unit, WorkKind


class DeviceLoop:
    """Owns scheduler, runner and live requests of one base model. Every method runs on the device thread.

    Attributes:
        others_run: another base model has rows, so that training may not take all time which the rows here leave.
    """

    def __init__(self, parts: EngineParts, publish: PublishEvents) -> None:
        self.others_run = False
        self._scope = scope = FaultScope()
        self._runner = runner = parts.runner
        self.adapters = adapters = parts.adapters
        self._training = parts.training
        self._queue_timeout_s = parts.queue_timeout_s
        self._limits = parts.limits
        self._memory = memory = PoolMemory(runner.cache, adapters, scope)
        self._gives_way = False  # cached prefixes are giving memory to adapters or training
        open_accounts(runner.cache.device, adapters, parts.training)
        self.scheduler = scheduler = RLAwareScheduler(parts.scheduler, memory, parts.cost)
        self._requests = requests = LiveRequests(scope, parts.vocabulary, scheduler, adapters, publish)
        self.counters = requests.counters
        self._forwards = forwards = Forwards(runner, requests, scheduler, memory, parts.lookahead)
        self._disk = DiskPrefixes(parts.prefix_store, runner.cache, memory.prefix_root) if parts.prefix_store else None
        self._trace = UnitTrace(parts.trace)
        self._check_every_unit = parts.check_every_unit
        self._draft_model = parts.draft_model
        in_block = runner.cache.tails is not None
        drafting = Drafting(parts.guesses_from, scope, parts.draft_model, in_block)
        self._drafting = drafting if parts.guesses_from else None
        self._recovery = Recovery(runner, forwards, requests, scheduler, adapters, parts.training, parts.draft_model)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. A request that can never fit in the KV pool fails at once."""
        longest_row = self._runner.cache.longest_row
        with self.surviving():
            live = self._requests.open(request)
            tokens = max(map(len, request.prompts)) + request.stopping.max_tokens
            if tokens > longest_row:
                message = (
                    f"prompt and max_tokens need {tokens} tokens of KV memory, the server has room for {longest_row}; "
                    "shorten them or raise --kv-cache-memory"
                )
                self._requests.fail(live, ContextLengthError(message))
            if request.pooling is not None and not self._runner.pools:
                message = "this model's architecture gives no hidden states that could be pooled to a vector"
                self._requests.fail(live, InvalidRequestError(message, param="model"))
            if self._disk is not None:
                self._disk.look_up(live)
            for sequence in tuple(live.unfinished):
                self._requests.finish_if_nothing_to_do(sequence)
            self._requests.flush()

    def fail_overdue(self, now: float) -> None:
        """Fails requests that have waited in the queue for longer than `queue_timeout_s`."""
        if self._queue_timeout_s is not None:
            self._requests.fail_overdue(now - self._queue_timeout_s)
            self._requests.flush()

    def abort(self, request_id: str) -> None:
        """Frees everything that a request holds. Publishes nothing, because its client is gone."""
        with self.surviving():
            self._requests.abort(request_id)

    def after_call(self, seconds: float) -> None:
        """Call this when the device thread has done something else for `seconds`, between two units."""
        self.scheduler.gap.add_wait_time(seconds)
        with self.surviving():
            self._tidy()

    def rest(self) -> None:
        """Reads the unit in flight. Afterwards the device thread may do other things than `step`: no error of this loop
        can show there."""
        with self.surviving():
            self._forwards.commit()
            self._requests.flush()

    def pause(self, mode: PauseMode) -> None:
        """Makes new requests wait for `resume`; `mode` says what happens to those in progress."""
        self.scheduler.pause(freeze=mode is PauseMode.KEEP)
        if mode is PauseMode.WAIT:
            return
        self.rest()  # its tokens are published
        if mode is PauseMode.ABORT:
            self._requests.fail_all(AbortedError("the server was paused"))
        self._requests.flush()

    def relieve(self, relief: Relief) -> None:
        """Holds less memory, as this step says, or as much as before."""
        self._runner.cache.device.keep_prefixes(relief < Relief.PREFIXES)
        self.scheduler.holds_rollouts = relief >= Relief.ROLLOUTS

    def forget_speed(self) -> None:
        """Has the next units say how fast the machine is."""
        self.scheduler.cost.forget()
        if self._draft_model is not None:
            self._draft_model.cost.forget()

    def reset_prefix_cache(self, files: bool = False) -> Future[int]:
        """Forgets every cached prefix, and returns the number of tokens that were cached. Live rows keep theirs.

        With `files`, the future is done when the files of cached prefixes are removed too.
        """
        tokens = self._runner.cache.reset()
        return then(self._disk.clear(), lambda _: tokens) if files and self._disk is not None else completed(tokens)

    def give_back_memory(self) -> None:
        """Gives all memory back to the device that nothing uses. The next rows allocate it again."""
        self._memory.give_back()

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admits sequences and runs the next unit of device work. False if there is none."""
        busy, trained = True, 0
        with self.surviving():
            started = time.monotonic()
            if self.adapters.failures:
                self._fail_without_adapter()
            if self._disk is not None:
                self._disk.advance(started)
            self.scheduler.admit()
            admitted = time.monotonic()
            self.scheduler.gap.add_wait_time(admitted - started)
            trained = self.counters.training_units
            busy = self._run_next(admitted)
            trained = self.counters.training_units - trained
            self._recovery.went_well()
        with self.surviving():
            busy = self._tidy(others_wait=trained > 0 and self._runner.cache.bytes_used > 0) or busy
            busy = busy or (self._disk is not None and self._disk.save())
        if busy and self._check_every_unit:
            self.check_integrity()
        return busy

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Hands the errors of the block to `Recovery`, so that the thread continues. MLX is called in such blocks only.

        Raises:
            DeviceLostError: the device keeps failing.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - MLX may raise anything, and one fault must not stop all clients
            self._recovery.survive(error)

    def _run_next(self, now: float) -> bool:
        if self._drafting is not None and self._reads_before_guessing(self._drafting):
            return True  # the next call admits and schedules again, with the tokens that were drawn
        unit = self.scheduler.next_unit(now, self._candidates(now), self.others_run)
        if self._forwards.in_flight and not isinstance(unit, ForwardUnit):
            with self._trace.span("read tokens"):
                self._forwards.commit()  # the next call schedules again, with the tokens that were drawn
        elif unit is not None:
            with self._trace.unit(unit):
                self._run(unit)
        else:
            return False
        self._requests.flush()
        return True

    def _reads_before_guessing(self, drafting: Drafting) -> bool:
        """Guesses the next tokens of the rows. If drafts would gain much, reads the unit in flight, so that the next
        one can have them, and returns True."""
        drafting.guess([live(sequence) for sequence in self.scheduler.live])
        if not self._forwards.in_flight:
            self._draw_with_model(drafting)
            return False
        if not self.scheduler.waits_for_tokens(drafting.model_cost):
            return False
        self._forwards.commit()
        self._requests.flush()
        return True

    def _draw_with_model(self, drafting: Drafting) -> None:
        """Lets the draft model guess where that pays. The rows wait for it."""
        if drafting.model_cost is None:
            return
        if tokens := self.scheduler.tokens_to_draw(drafting.model_cost):
            seconds = drafting.draw(tokens, min(self.scheduler.gap.chunk_s, self.scheduler.gap.remaining_s))
            self.scheduler.gap.add_wait_time(seconds)
            self.counters.add_seconds(DeviceSeconds(decode=seconds))

    def _tidy(self, others_wait: bool = False) -> bool:
        """Gives back some of the memory that rows and cached prefixes do not need, or that adapters and training do.

        Args:
            others_wait: rows have just waited for training, and should not wait for copies of arenas as well. A version
                that is to go live does not wait for them either.

        Returns:
            Whether there is more to do: memory to give back, or training that has waited for it.
        """
        started, waited = time.monotonic(), self._gives_way
        left = self._memory.tidy(started, others_wait or self.adapters.urgent)
        if self._draft_model is not None and self._draft_model.tidy():
            left = True
        self._gives_way = left and self._runner.cache.device.excess > 0
        self.scheduler.gap.add_wait_time(time.monotonic() - started)
        return left or waited

    def _candidates(self, now: float) -> Iterator[Candidate]:
        """The work that waits for the device beside requests. Training waits until the KV pool has given it memory."""
        if self.adapters.waits():
            yield Candidate(WorkKind.STAGING, due=now if self.adapters.urgent else math.inf)
        if self._training is not None and self._training.waits() and not self._gives_way:
            yield Candidate(WorkKind.TRAINING)

    def _run(self, unit: Unit) -> None:
        match unit:
            case ForwardUnit():
                self._forwards.run(unit)
            case StagingUnit():
                self._stage(unit)
            case TrainingUnit():
                self._train(unit)

    def close(self) -> None:
        """Closes the debug trace. Called once, after the last step."""
        self._trace.close()

    def unload(self) -> None:
        """Empties the adapter bank, and ends the sharing of memory. There must be no request. Nothing may be called
        afterwards, and the arrays are freed with this object."""
        self._runner.cache.device.leave()
        if self._draft_model is not None:
            self._draft_model.leave()
        self.adapters.unload()
        self.close()

    @property
    def has_rows(self) -> bool:
        return bool(self.scheduler.live)

    # -- adapters and training -------------------------------------------------------------------

    def _stage(self, unit: StagingUnit) -> None:
        """Stages at most one version. Rows waiting for it are admitted before the next version may take the slot;
        otherwise two versions competing for one slot would evict each other forever."""
        adapters, slots, started = self.adapters, self.adapters.slots, time.monotonic()
        staged = slots.staged
        with self._scope.covering(work=adapters):
            adapters.advance()
            while time.monotonic() - started < unit.seconds and slots.staged == staged and adapters.waits():
                adapters.advance()
        seconds = time.monotonic() - started
        self.counters.add_seconds(DeviceSeconds(other=seconds))
        self.scheduler.gap.add_staging(seconds)

    def _train(self, unit: TrainingUnit) -> None:
        """Runs one unit of an update. Its time counts even if it fails."""
        assert self._training is not None
        started = time.monotonic()
        try:
            with self._scope.covering(work=self._training):
                self._training.pace(unit.seconds)
                self._training.advance()
        finally:
            now = time.monotonic()
            self.counters.training_units += 1
            self.counters.add_seconds(DeviceSeconds(training=now - started))
            self.scheduler.record_training(now - started, now)

    # -- faults ----------------------------------------------------------------------------------

    def _fail_without_adapter(self) -> None:
        """Fails requests whose adapter cannot be staged. They hold no row."""
        for ref, error in self.adapters.take_failures().items():
            for request in self._requests.of_adapter(ref):
                self._requests.fail(request, error)
        self._requests.flush()

    # -- state -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        peak = mx.get_peak_memory() if self._training is None else self._training.peak_bytes
        lives, cache = self._requests.lives(), self._runner.cache
        return snapshot(self.counters, self.scheduler, cache, self._disk, lives, peak, self._limits)

    def check_integrity(self) -> None:
        """Raises AssertionError if scheduler, KV pool, adapter slots and live requests do not agree."""
        self.scheduler.check_integrity()
        self._runner.cache.check_integrity()
        self._runner.cache.device.check_integrity()
        self.adapters.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()
        self._requests.check_integrity()
        rows = [live(sequence) for sequence in self.scheduler.live]
        assert set(map(id, rows)) == set(map(id, self._runner.cache.rows()))
        assert self.adapters.slots.pinned == len({row.adapter_slot for row in rows} - {0})
