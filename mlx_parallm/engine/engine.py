"""Engine serves one base model, and trains on it, one unit of device work at a time.

    host      schedule, build k+1 ─ wait ─ launch k+1 ─ read the tokens of k and deliver them, schedule, build k+2 ─ ...
    device    k ─────────────────────────┘            └ k+1 ─────────────────────────────────────────────────────

A forward unit is built while the one before it runs. It is launched when that one has ended, and before its tokens are
read, but not earlier, because it would copy the KV pool (see `runner`). If a sequence ends at one unit, it may have one
more token in flight, which is discarded. If one has a grammar, the tokens of unit k are read while the forward pass of
unit k+1 runs, and its logits are masked before its tokens are sampled. Before an adapter is staged, or a part of a
training micro-step runs, the tokens in flight are read.

On a CPU, the call that launches a unit computes most of it. Launching ahead would gain nothing and deliver every token
one unit later, so there each unit is read before the next one is built (`lookahead` False).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import mlx.core as mx

from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.batch.runner import BatchRunner, Launched, Pending
from mlx_parallm.batch.sampling import SampledToken
from mlx_parallm.core.device import PauseMode, TrainingWork, completed, then
from mlx_parallm.core.machine import Relief
from mlx_parallm.core.requests import GenerationRequest
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.disk_prefixes import DiskPrefixes
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.faults import Affecting, Recovery
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.engine.memory import PoolMemory
from mlx_parallm.engine.requests import PublishEvents, Request, Requests
from mlx_parallm.engine.scheduler import RLAwareScheduler, SchedulerConfig
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.engine.speculate import Source, Speculator
from mlx_parallm.engine.stats import UnitTrace, snapshot
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit, Unit, UnitSpan
from mlx_parallm.errors import AbortedError, ContextLengthError, InvalidRequestError
from mlx_parallm.kv.disk import PrefixStore
from mlx_parallm.kv.row import BEFORE_DRAFT
from mlx_parallm.model.device import MemoryLimits


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine, which the device thread builds before it serves.

    `base`: the base model's name. `training`: None if this server does not train. `lookahead`: build each unit while
    the unit before it runs, and launch it before the tokens of that one are read, unless it has drafts.
    `draft_sources`: where the tokens of drafts come from; nothing: there are no drafts. `draft_model`: the one that
    `Source.MODEL` means.
    `queue_timeout_s`: longest time that an inference request may wait for its first forward unit; None for no limit.
    `limits`: the limits set on MLX's memory, for `/debug/state`. `prefix_store`: None if cached prefixes are kept in
    memory only. `trace` and `check_every_unit`: see `config.DebugConfig`.
    """

    runner: BatchRunner
    adapters: AdapterStore
    vocabulary: Vocabulary
    scheduler: SchedulerConfig
    cost: CostModel
    training: TrainingWork | None = None
    lookahead: bool = True
    draft_sources: frozenset[Source] = frozenset()
    draft_model: DraftModel | None = None
    queue_timeout_s: float | None = None
    limits: MemoryLimits | None = None
    prefix_store: PrefixStore | None = None
    trace: Path | None = None
    check_every_unit: bool = False
    base: str = ""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched unit and the time of its launch, or of its end once it has ended."""

    unit: ForwardUnit
    launched: Launched
    at: float

    @property
    def requests(self) -> set[Request]:
        rows = (span.row for span in self.unit.spans)
        return {sequence.request for sequence in rows if sequence.status is not SequenceStatus.FINISHED}


class Engine:
    """Owns scheduler, runner and requests of one base model. Every method runs on the device thread.

    Args:
        publish: publishes the events of one unit of work, in order, each with the id of its request.
        others_run: whether another base model has rows, so that training may not take all time which the rows here
            leave.
        begins: called with its name before each piece of device work; see `DeviceWatchdog`.
    """

    def __init__(
        self,
        parts: EngineParts,
        publish: PublishEvents,
        others_run: Callable[[], bool] = lambda: False,
        begins: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.runner = parts.runner
        self.adapters = parts.adapters
        self.training = parts.training
        self.draft_model = parts.draft_model
        self._parts = parts
        self._others_run = others_run
        self._begins = begins
        self._cache = cache = parts.runner.cache
        self.memory = PoolMemory(cache, parts.adapters, parts.training, parts.draft_model)
        self.scheduler = RLAwareScheduler(parts.scheduler, self.memory, parts.cost)
        self.requests = Requests(parts.vocabulary, self.scheduler, parts.adapters, publish)
        self.counters = self.requests.counters
        self._disk = DiskPrefixes(parts.prefix_store, cache, self.memory.prefix_root) if parts.prefix_store else None
        self._trace = UnitTrace(parts.trace)
        speculation = Speculator(parts.draft_sources, parts.draft_model, cache.layout)
        self._speculation = speculation if parts.draft_sources else None
        self._recovery = Recovery(self)
        self._in_flight: _InFlight | None = None
        self._ended: _InFlight | None = None  # its tokens are not read yet
        self._ended_at = 0.0  # when the last forward unit ended

    # -- one unit after the other ----------------------------------------------------------------

    def step(self) -> bool:
        """Admits sequences and runs the next unit of device work. False if there is none."""
        busy, trained = True, self.counters.training_units
        with self.surviving():
            busy = self._run_next(self._admit())
            self._recovery.went_well()
        if not busy or self.memory.is_untidy:
            self._begins("tidying the KV cache")
            trained = self.counters.training_units - trained
            with self.surviving():
                busy = self._tidy(others_wait=trained > 0 and self._cache.bytes_used > 0) or busy
                busy = busy or (self._disk is not None and self._disk.save())
        if busy and self._parts.check_every_unit:
            self.check_integrity()
        return busy

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Hands the errors of the block to `Recovery`, so that the thread continues, and publishes the block's events.
        MLX is called in such blocks only.

        Raises:
            DeviceLostError: the device keeps failing.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - MLX may raise anything, and one fault must not stop all clients
            self._recovery.survive(error)
        finally:
            self.requests.flush()

    def _admit(self) -> float:
        """Gives rows to waiting sequences. Returns the time."""
        started = time.monotonic()
        if self.adapters.failures:
            self._fail_without_adapter()
        if self._disk is not None:
            self._disk.advance(started)
        self.scheduler.admit()
        admitted = time.monotonic()
        self.scheduler.gap.add_wait_time(admitted - started)
        return admitted

    def _run_next(self, now: float) -> bool:
        """Chooses a unit and runs it. False if there is nothing to do.

        While a forward unit is in flight, any other unit waits until its tokens are read, and is chosen anew then.
        Training waits until the KV pool has given it memory.
        """
        if self._speculation is not None and self._reads_before_drafting(self._speculation):
            return True  # the next call admits and schedules again, with the tokens that were sampled
        unit = self.scheduler.next_unit(
            now,
            staging=self.adapters.waits(),
            urgent=self.adapters.urgent,
            training=self.training is not None and self.training.waits() and not self.memory.gives_way,
            others_run=self._others_run(),
        )
        if self.in_flight and not isinstance(unit, ForwardUnit):
            self._begins("reading tokens")
            with self._trace.span("read tokens"):
                self.commit()
        elif unit is not None:
            self._run(unit)
        else:
            return bool(self.adapters.failures)  # which the next call publishes
        return True

    def _run(self, unit: Unit) -> None:
        self._begins(unit.stage)
        match unit:
            case ForwardUnit(spans=spans, decodes=rows, chunks=chunks):
                tokens = sum(chunk.tokens for chunk in chunks)
                with self._trace.span("forward", rows=rows, prompts=len(spans) - rows, tokens=tokens):
                    self._forward(unit)
            case StagingUnit():
                with self._trace.span("stage adapters"):
                    self._stage(unit)
            case TrainingUnit():
                with self._trace.span("train"):
                    self._train(unit)

    # -- forward units ---------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether a forward unit is launched, and its end was not waited for."""
        return self._in_flight is not None

    def _forward(self, unit: ForwardUnit) -> None:
        """Builds and launches one unit, and reads the one before it."""
        started = time.monotonic()
        try:
            pending = self._build(unit, started)
            self._wait()
            launched = self._launch(unit, pending, started)
        finally:
            self._read()  # the unit before has ended, and is read even if this one fails
        self._in_flight = launched  # set last, so that this unit is dropped if reading the one before it fails
        if unit.drafts or unit.delayed or not self._parts.lookahead:
            self.commit()  # else waiting work, or these tokens, would wait for another unit

    def commit(self) -> None:
        """Waits for the unit in flight, if there is one, and gives its tokens to their sequences."""
        self._wait()
        self._read()

    def drop_in_flight(self) -> set[Request]:
        """Forgets the unit in flight. Returns the requests that have rows in it."""
        in_flight, self._in_flight = self._in_flight, None
        return set() if in_flight is None else in_flight.requests

    def _build(self, unit: ForwardUnit, now: float) -> Pending:
        rows = [span.row for span in unit.spans]
        for span in unit.spans:
            if span.row.drafted:
                with Affecting([span.row.request]):
                    span.row.draft_sampling = span.row.sampling.along(span.row.draft)
            if self._cache.states is not None:
                self.memory.reserve_checkpoint(span.row, span.stop)
        before = self._in_flight or self._ended
        with Affecting({sequence.request for sequence in rows}):
            pending = self.runner.begin(unit.spans, unit.sampling, before.launched if before else None)
            self.scheduler.record_launch(unit, now)
            self.requests.started(rows)
        return pending

    def _wait(self) -> None:
        """Waits for the unit in flight, if there is one."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        with Affecting(in_flight.requests):
            self.runner.wait()
        now = time.monotonic()
        waited_for = self._parts.lookahead and in_flight.unit.drafts and not in_flight.unit.delayed
        launched_at = self._ended_at if waited_for and not self._others_run() else in_flight.at
        seconds = now - max(launched_at, self._ended_at)  # a unit with drafts has kept the device waiting
        prefill_s = self.scheduler.record_done(in_flight.unit, seconds, now)
        self.counters.add_seconds(decode=seconds - prefill_s, prefill=prefill_s)
        self._ended, self._ended_at = replace(in_flight, at=now), now

    def _launch(self, unit: ForwardUnit, pending: Pending, started: float) -> _InFlight:
        with Affecting({span.row.request for span in unit.spans}):
            if pending.needs_previous_tokens:
                self.runner.launch(pending)
                self._read()
            launched = self.runner.sample(pending)
        self.counters.steps += bool(unit.sampling)
        self.counters.prefilled_tokens += sum(chunk.tokens for chunk in unit.chunks)
        return _InFlight(unit, launched, started)

    def _read(self) -> None:
        """Gives the tokens of the unit that has ended, if there is one, to their sequences."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        launched = ended.launched
        with Affecting(ended.requests):
            samples = self.runner.read(launched)
            scores = [(sequence, start, part.read()) for sequence, start, part in launched.scores]
            pooled = launched.pooled.read() if launched.pooled else []
        for sequence, start, part in scores:
            self.requests.add_scores(sequence, start, part)
        for span, vector in pooled:
            self.requests.add_pooled(span.row, span.start, span.stop, vector)
        for sequence, of_row in groupby(zip(launched.rows, samples, strict=True), key=itemgetter(0)):
            self._deliver(sequence, [sample for _, sample in of_row], ended.at)
        for span in ended.unit.spans:
            self._after(span)

    def _deliver(self, sequence: Sequence, samples: Seq[SampledToken], now: float) -> None:
        """Gives a sequence its tokens, up to the first one that differs from the draft after which the next one was
        sampled.

        At each moment the sequence is as if its tokens had come one by one, because any of them may end it.
        """
        drafter, draft, drafted = sequence.drafter, sequence.proposed, len(samples) - 1
        source = "" if drafter is None else drafter.source.value
        sequence.proposed, sequence.drafted, sequence.draft_sampling = (), 0, ()
        if drafted:
            sequence.take_back(drafted)
            self.counters.drafted[source] += drafted
        for place, sample in enumerate(samples):
            if sequence.status is SequenceStatus.FINISHED:
                return
            if place:
                sequence.keep_drafted()
                self.counters.accepted[source] += 1
            self.requests.accept(sequence, sample, now)
            if drafter is None or place == len(draft) or not drafter.add(draft[place] == sample.token):
                break
        if drafted:
            sequence.count_again()

    def _after(self, span: UnitSpan) -> None:
        """Registers the full blocks of a row, after the unit with this span of it was read, and brings its states back
        to where its draft was wrong. Ends a sequence whose prompt is computed and that samples no token. Does nothing
        if the sequence has ended or was preempted meanwhile."""
        sequence = span.row
        if sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING):
            if BEFORE_DRAFT in sequence.checkpoints:
                self._cache.settle_draft(sequence, span.start, right=sequence.computed == span.stop)
            self.memory.keep(sequence)
            if sequence.max_tokens == 0 and sequence.to_compute == 0 and sequence.computed == span.stop:
                self.requests.finish_prompt(sequence)

    # -- drafts ----------------------------------------------------------------------------------

    def _reads_before_drafting(self, speculation: Speculator) -> bool:
        """Proposes the next tokens of the rows. If drafts would gain much, reads the unit in flight, so that the next
        one can have them, and returns True."""
        speculation.propose(self.scheduler.live)
        if not self.in_flight:
            self.counters.add_seconds(decode=speculation.run_draft_model(self.scheduler))
            return False
        if not speculation.worth_waiting(self.scheduler):
            return False
        self.commit()
        return True

    # -- adapters and training -------------------------------------------------------------------

    def _stage(self, unit: StagingUnit) -> None:
        """Stages at most one version. Rows waiting for it are admitted before the next version may take the slot;
        otherwise two versions competing for one slot would evict each other forever."""
        adapters, started = self.adapters, time.monotonic()
        staged = adapters.staged_total
        with Affecting(work=adapters):
            adapters.advance()
            while time.monotonic() - started < unit.seconds and adapters.staged_total == staged and adapters.waits():
                adapters.advance()
        seconds = time.monotonic() - started
        self.memory.changed = True
        self.counters.add_seconds(other=seconds)
        self.scheduler.gap.add_staging(seconds)

    def _train(self, unit: TrainingUnit) -> None:
        """Runs one unit of an update. Its time counts even if it fails."""
        assert self.training is not None
        started = time.monotonic()
        try:
            with Affecting(work=self.training):
                self.training.pace(unit.seconds)
                self.training.advance()
        finally:
            now = time.monotonic()
            self.memory.changed = True
            self.counters.training_units += 1
            self.counters.add_seconds(training=now - started)
            self.scheduler.record_training(now - started, now)

    def _fail_without_adapter(self) -> None:
        """Fails requests whose adapter cannot be staged. They hold no row."""
        for ref, error in self.adapters.take_failures().items():
            self.requests.fail_all(error, ref)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, asked: GenerationRequest) -> None:
        """Queues a request. A request that can never fit in the KV pool fails at once."""
        longest_row = self._cache.longest_row
        with self.surviving():
            request = self.requests.open(asked)
            tokens = max(map(len, asked.prompts)) + asked.stopping.max_tokens
            if tokens > longest_row:
                message = (
                    f"prompt and max_tokens need {tokens} tokens of KV memory, the server has room for {longest_row}; "
                    "shorten them or raise --kv-cache-memory"
                )
                self.requests.fail(request, ContextLengthError(message))
            if asked.pooling is not None and not self.runner.pools:
                message = "this model's architecture gives no hidden states that could be pooled to a vector"
                self.requests.fail(request, InvalidRequestError(message, param="model"))
            if self._disk is not None:
                self._disk.look_up(request)
            for sequence in tuple(request.unfinished):
                self.requests.finish_prompt(sequence)

    def fail_overdue(self, now: float) -> None:
        """Fails requests that have waited in the queue for longer than `queue_timeout_s`."""
        if self._parts.queue_timeout_s is not None:
            with self.surviving():
                self.requests.fail_overdue(now - self._parts.queue_timeout_s)

    def abort(self, request_id: str) -> None:
        """Frees everything that a request holds. Publishes nothing, because its client is gone."""
        with self.surviving():
            self.requests.abort(request_id)

    # -- between units ---------------------------------------------------------------------------

    def rest(self) -> None:
        """Reads the unit in flight. Afterwards the device thread may do other things than `step`: no error of this
        engine can show there."""
        with self.surviving():
            self.commit()

    def after_call(self, seconds: float) -> None:
        """Call this when the device thread has done something else for `seconds`, between two units."""
        self.scheduler.gap.add_wait_time(seconds)
        with self.surviving():
            self._tidy()

    def pause(self, mode: PauseMode) -> None:
        """Makes new requests wait until the scheduler resumes; `mode` says what happens to those in progress."""
        self.scheduler.pause(freeze=mode is PauseMode.KEEP)
        if mode is PauseMode.WAIT:
            return
        self.rest()  # its tokens are published
        if mode is PauseMode.ABORT:
            with self.surviving():
                self.requests.fail_all(AbortedError("the server was paused"))

    def forget_speed(self) -> None:
        """Has the next units say how fast the machine is."""
        self.scheduler.cost.forget()
        if self.draft_model is not None:
            self.draft_model.cost.forget()

    # -- memory ----------------------------------------------------------------------------------

    def _tidy(self, others_wait: bool = False) -> bool:
        """See `PoolMemory.tidy`. Rows wait for it."""
        started = time.monotonic()
        more = self.memory.tidy(others_wait)
        self.scheduler.gap.add_wait_time(time.monotonic() - started)
        return more

    def relieve(self, relief: Relief) -> None:
        """Holds less memory, as this step says, or as much as before."""
        self._cache.device.keep_prefixes(relief < Relief.PREFIXES)
        self.memory.changed = True
        self.scheduler.holds_rollouts = relief >= Relief.ROLLOUTS

    def reset_prefix_cache(self, files: bool = False) -> Future[int]:
        """Forgets every cached prefix, and returns the number of tokens that were cached. Live rows keep theirs.

        With `files`, the future is done when the files of cached prefixes are removed too.
        """
        tokens = self._cache.index.reset()
        return then(self._disk.clear(), lambda _: tokens) if files and self._disk is not None else completed(tokens)

    def close(self) -> None:
        """Closes the debug trace. Called once, after the last step."""
        self._trace.close()

    def unload(self) -> None:
        """Empties the adapter bank, and ends the sharing of memory. There must be no request. Nothing may be called
        afterwards, and the arrays are freed with this object."""
        self._cache.device.leave()
        if self.draft_model is not None:
            self.draft_model.leave()
        self.adapters.unload()
        self.close()

    # -- state -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        peak = mx.get_peak_memory() if self.training is None else self.training.peak_bytes
        sequences, limits = self.requests.sequences, self._parts.limits
        return snapshot(self.counters, self.scheduler, self._cache, self._disk, sequences, peak, limits)

    def check_integrity(self) -> None:
        """Raises AssertionError if scheduler, KV pool, adapter slots and requests do not agree."""
        self.scheduler.check_integrity()
        self.memory.check_integrity()
        self.adapters.check_integrity()
        if self.draft_model is not None:
            self.draft_model.check_integrity()
        self.requests.check_integrity()
        rows = self.scheduler.live
        assert set(map(id, rows)) == set(map(id, self._cache.rows))
        assert self.adapters.pinned == len({sequence.adapter_slot for sequence in rows} - {0})
