"""What the device thread does, one unit at a time: schedule → run → commit → publish.

Decode is pipelined: step k+1 is launched before step k's tokens are read, so a row that ends at step
k may have one more token in flight; it is thrown away. Anything else (a prefill chunk, idling) first
commits the step in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_parallm.batch.runner import BatchRunner, Draw, Step
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.core import (
    EngineStats,
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    SequenceOutput,
)
from mlx_parallm.engine.live import LiveRequest, LiveSequence, Vocabulary, expand
from mlx_parallm.engine.memory import PoolMemory
from mlx_parallm.engine.snapshot import Counters, snapshot
from mlx_parallm.errors import ContextLengthError, StepFailedError
from mlx_parallm.scheduler.cost import CostModel
from mlx_parallm.scheduler.rl_aware import DecodeUnit, PrefillPart, PrefillUnit, RLAwareScheduler, SchedulerConfig
from mlx_parallm.scheduler.sequence import Sequence, Status

_log = logging.getLogger(__name__)

Publish = Callable[[list[tuple[str, Event]]], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the device thread builds before it serves."""

    runner: BatchRunner
    vocabulary: Vocabulary
    scheduler: SchedulerConfig
    cost: CostModel


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step and the live sequence of each of its rows, in the step's order."""

    step: Step
    lives: tuple[LiveSequence, ...]


class DeviceLoop:
    """Owns scheduler, runner and live sequences. Every method runs on the device thread.

    Args:
        publish: takes the events of one unit, in order, with the ids of their requests.
    """

    def __init__(self, parts: EngineParts, publish: Publish) -> None:
        self.counters = Counters()
        self._runner = parts.runner
        self._vocabulary = parts.vocabulary
        self._publish = publish
        self._requests: dict[str, LiveRequest] = {}
        self._lives: dict[int, LiveSequence] = {}
        self._scheduler = RLAwareScheduler(parts.scheduler, PoolMemory(parts.runner.cache, self._lives), parts.cost)
        self._in_flight: _InFlight | None = None
        self._events: list[tuple[str, Event]] = []
        self._next_id = 0

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. One that can never fit in the pool fails at once."""
        now = time.monotonic()
        live = expand(request, self._vocabulary, self._next_id, now)
        self._next_id += request.sequences
        self._requests[request.request_id] = live
        for sequence in tuple(live.unfinished):
            self._lives[sequence.sequence.sequence_id] = sequence
            self._scheduler.add(sequence.sequence)
        self.counters.prompt_tokens += sum(map(len, request.prompts))
        self._refuse_oversized(live)
        for sequence in tuple(live.unfinished):
            self._finish_if_nothing_to_do(sequence)
        self._flush()

    def abort(self, request_id: str) -> None:
        """Frees everything a request holds. Nothing is published: nobody listens any more."""
        live = self._requests.pop(request_id, None)
        if live is None:
            return
        self.counters.aborted += 1
        for sequence in tuple(live.unfinished):
            self._end(sequence)

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs the next unit of device work; False when there was none."""
        started = time.monotonic()
        self._scheduler.admit(started)
        admitted = time.monotonic()
        self._scheduler.spent(admitted - started)
        unit = self._scheduler.next_unit(admitted)
        if isinstance(unit, DecodeUnit):
            self._decode(unit)
        elif self._in_flight is not None:
            self._commit()  # the scheduler decides again, knowing what was drawn
        elif isinstance(unit, PrefillUnit):
            self._prefill(unit)
        else:
            return False
        self._flush()
        return True

    def _decode(self, unit: DecodeUnit) -> None:
        lives = {id(live.row): live for live in map(self._live, unit.sequences)}
        rows = [live.row for live in lives.values() if live.row is not None]
        previous = self._in_flight
        try:
            step = self._runner.launch(rows, previous.step if previous else None)
        except Exception as error:  # noqa: BLE001 - whatever the forward raises costs the rows of this step, not the thread
            self._commit()
            self._recover(lives.values(), error)
            return
        self.counters.steps += 1
        self._scheduler.launched(unit)
        self._in_flight = _InFlight(step, tuple(lives[id(row)] for row in step.rows))
        if previous is not None:
            self._read(previous)

    def _commit(self) -> None:
        """Reads the step in flight, if there is one."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._read(step)

    def _read(self, in_flight: _InFlight) -> None:
        try:
            draws = self._runner.read(in_flight.step)
        except Exception as error:  # noqa: BLE001 - a lazy step fails where it is read: it costs its own rows
            self._recover(in_flight.lives, error)
            return
        now = time.monotonic()
        for live, draw in zip(in_flight.lives, draws, strict=True):
            if live.sequence.status is not Status.FINISHED:
                self._accept(live, draw, now)

    def _prefill(self, unit: PrefillUnit) -> None:
        started = time.monotonic()
        try:
            self._run_prefill(unit)
        except Exception as error:  # noqa: BLE001 - whatever the forward raises costs this unit's requests, not the thread
            self._recover([self._live(part.sequence) for part in unit.parts], error)
            return
        now = time.monotonic()
        self.counters.prefilled_tokens += unit.tokens
        self._scheduler.prefilled(unit, now - started, now)
        for part in unit.parts:
            if part.sequence.to_prefill == 0:
                live = self._live(part.sequence)
                self._send_scores(live)
                self._finish_if_nothing_to_do(live)

    def _run_prefill(self, unit: PrefillUnit) -> None:
        if unit.parts[0].sequence.scored:
            self._score(unit.parts[0])
        else:
            self._runner.prefill([self._chunk(part) for part in unit.parts])

    def _score(self, part: PrefillPart) -> None:
        live = self._live(part.sequence)
        row, chunk = self._chunk(part)
        tokens, start = part.sequence.tokens, part.sequence.computed
        assert live.scores is not None
        del live.scores[start + 1 :]  # a preempted prompt is scored again from its start
        targets = tokens[start + 1 : start + part.tokens + 1]
        live.scores += self._runner.score(row, chunk, targets, live.request.request.prompt_logprobs or 0)

    def _chunk(self, part: PrefillPart) -> tuple[KVRow, list[int]]:
        row, start = self._live(part.sequence).row, part.sequence.computed
        assert row is not None
        return row.kv, part.sequence.tokens[start : start + part.tokens]

    # -- what a token leads to -------------------------------------------------------------------

    def _accept(self, live: LiveSequence, draw: Draw, now: float) -> None:
        request = live.request
        live.sequence.tokens.append(draw.token)
        if live.row is not None and live.sequence.unread == 0:
            live.row.input_token = draw.token
        request.first_token_at = request.first_token_at or now
        request.completion_tokens += 1
        self.counters.generation_tokens += 1
        delta = live.text.accept(draw.token)
        logprobs = () if draw.logprob is None else (draw.logprob,)
        output = SequenceOutput(live.index, (draw.token,), delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        self._emit(request, output)
        if delta.finish_reason is not None:
            self._end(live)

    def _send_scores(self, live: LiveSequence) -> None:
        if live.scores is not None:
            live.sequence.scored = False
            prompt_index = live.index // live.request.request.n
            self._emit(live.request, PromptScored(prompt_index, tuple(live.scores)))
            live.scores = None

    def _finish_if_nothing_to_do(self, live: LiveSequence) -> None:
        """Ends a sequence that draws nothing (max_tokens 0), once its prompt is scored if it is to be."""
        sequence = live.sequence
        if live.scores is not None and sequence.prompt_length == 1:
            self._send_scores(live)
        if sequence.max_tokens == 0 and live.scores is None:
            self._emit(live.request, SequenceOutput(live.index, (), "", finish_reason=FinishReason.LENGTH))
            self._end(live)

    def _end(self, live: LiveSequence) -> None:
        """Frees a sequence's row and closes its request when it was the last."""
        request = live.request
        if live.sequence.admitted_at:
            request.admitted_at = min(request.admitted_at or live.sequence.admitted_at, live.sequence.admitted_at)
        self._scheduler.finish(live.sequence)
        del self._lives[live.sequence.sequence_id]
        request.unfinished.remove(live)
        if not request.unfinished and request.request_id in self._requests:
            del self._requests[request.request_id]
            self._emit(request, request.finished(time.monotonic()))

    # -- faults ----------------------------------------------------------------------------------

    def _refuse_oversized(self, live: LiveRequest) -> None:
        longest = max(map(len, live.request.prompts)) + live.request.stopping.max_tokens
        cache = self._runner.cache
        if not cache.can_ever_hold(longest):
            message = (
                f"prompt and max_tokens need {longest} tokens of KV memory, the server has room for "
                f"{min(cache.max_length, cache.budget_tokens)}; shorten them or raise --kv-cache-memory"
            )
            self._fail(live, ContextLengthError(message))

    def _recover(self, guilty: Iterable[LiveSequence], error: Exception) -> None:
        """After a failed unit: its requests fail, every other row is recomputed on fresh arrays.

        Arrays that a failed step was to write cannot be trusted, nor can those that share a slab with them.
        """
        _log.error("a unit of device work failed", exc_info=error)
        self.counters.failed_steps += 1
        self._in_flight = None
        for request in {live.request for live in guilty if live.sequence.status is not Status.FINISHED}:
            self._fail(
                request, StepFailedError(f"the model failed while computing this request: {type(error).__name__}")
            )
        for sequence in self._scheduler.live:
            self._scheduler.preempt(sequence)
        for live in self._lives.values():
            live.forget_unread(self._vocabulary.size)
        self._runner.cache.clear()

    def _fail(self, request: LiveRequest, error: Exception) -> None:
        self._requests.pop(request.request_id, None)
        for live in tuple(request.unfinished):
            self._end(live)
        self._emit(request, RequestFailed(error))

    # -- books -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        return snapshot(self.counters, self._scheduler, self._runner.cache, self._lives.values())

    def check_integrity(self) -> None:
        """Raises AssertionError when scheduler, pool and live sequences do not agree."""
        self._scheduler.check_integrity()
        self._runner.cache.check_integrity()
        assert {s.sequence_id for s in self._scheduler.sequences()} == set(self._lives)
        held = {id(live.row.kv) for live in self._lives.values() if live.row is not None}
        assert held == {id(row) for row in self._runner.cache.rows()}
        assert sum(len(request.unfinished) for request in self._requests.values()) == len(self._lives)
        for live in self._lives.values():
            assert live.row is None or live.row.kv.length == live.sequence.computed

    def _live(self, sequence: Sequence) -> LiveSequence:
        return self._lives[sequence.sequence_id]

    def _emit(self, request: LiveRequest, event: Event) -> None:
        self._events.append((request.request_id, event))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publish(events)
