"""LiveRequests: keeps each request and its sequences, from the request's submission to its last event."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.pooling import Vector
from mlx_parallm.batch.readback import Draw
from mlx_parallm.core import (
    AdapterRef,
    Event,
    FinishReason,
    GenerationRequest,
    Pooling,
    PromptGroup,
    PromptScored,
    RequestFailed,
    RequestStarted,
    SequenceOutput,
    SequencePooled,
    SequenceStatus,
    TokenLogprob,
    WorkClass,
)
from mlx_parallm.engine.live import FaultScope, LiveRequest, LiveSequence, Vocabulary, live_sequence
from mlx_parallm.engine.stats import Counters
from mlx_parallm.engine.text import TextDelta
from mlx_parallm.errors import GrammarError, QueueTimeoutError
from mlx_parallm.scheduler.scheduler import RLAwareScheduler

PublishEvents = Callable[[list[tuple[str, Event]]], None]
"""Publishes the events of one unit of work, in order, each with the id of its request."""


class LiveRequests:
    """Holds requests and sequences by id, and the events of the current unit of work. Device thread only.

    Args:
        scope: records for which requests MLX is being called, so that a fault fails only those.
    """

    def __init__(
        self,
        scope: FaultScope,
        vocabulary: Vocabulary,
        scheduler: RLAwareScheduler,
        adapters: AdapterStore,
        publish: PublishEvents,
    ) -> None:
        self.counters = Counters()
        self.scope = scope
        self._lives: dict[int, LiveSequence] = {}
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._adapters = adapters
        self._publish = publish
        self._requests: dict[str, LiveRequest] = {}
        self._events: list[tuple[str, Event]] = []
        self._next_id = 0

    # -- requests --------------------------------------------------------------------------------

    def open(self, request: GenerationRequest) -> LiveRequest:
        """Adds a request and queues its sequences."""
        live = LiveRequest(request, time.monotonic())
        self._requests[request.request_id] = live
        groups = [PromptGroup() for _ in request.prompts]
        with self.scope.covering([live]):
            live.unfinished = [
                live_sequence(live, index, self._next_id + index, groups[index // request.n], self._vocabulary)
                for index in range(request.sequences)
            ]
        self._next_id += request.sequences
        self._adapters.add_request(request.adapter)
        self.counters.prompt_tokens += sum(map(len, request.prompts))
        for sequence in live.unfinished:
            self._lives[sequence.sequence_id] = sequence
            self._scheduler.add(sequence)
        return live

    def abort(self, request_id: str) -> None:
        """Frees everything that a request holds. Publishes nothing, because its client is gone."""
        live = self._requests.pop(request_id, None)
        if live is None:
            return
        self.counters.aborted += 1
        for sequence in tuple(live.unfinished):
            self._end(sequence)

    def fail(self, request: LiveRequest, error: Exception) -> bool:
        """Ends a request with `error` and frees its rows. Returns False if it has ended already."""
        running = self._requests.pop(request.request_id, None) is not None
        if running:
            self._emit(request, RequestFailed(error))
        for live in tuple(request.unfinished):  # some are left if a fault has ended an earlier call
            self._end(live)
        return running

    def fail_overdue(self, arrived_before: float) -> None:
        """Fails inference requests that arrived before this time and have not begun. Rollouts may wait."""
        for request in tuple(self._requests.values()):
            if request.arrived_at >= arrived_before:
                return  # requests are in order of arrival
            if request.request.work_class is WorkClass.INFERENCE and not request.started_at:
                waited = time.monotonic() - request.arrived_at
                self.fail(request, QueueTimeoutError(f"The request waited {waited:.0f} s in the queue; try again."))

    def fail_all(self, error: Exception) -> None:
        for request in tuple(self._requests.values()):
            self.fail(request, error)

    def lives(self) -> Collection[LiveSequence]:
        return self._lives.values()

    def of_adapter(self, ref: AdapterRef) -> list[LiveRequest]:
        return [request for request in self._requests.values() if request.request.adapter == ref]

    # -- sequences -------------------------------------------------------------------------------

    def started(self, lives: Iterable[LiveSequence]) -> None:
        """Call this when a forward unit with these rows was launched."""
        for live in lives:
            request = live.request
            if not request.started_at:
                request.started_at = live.started_at
                self._emit(request, RequestStarted(request.arrived_at, request.started_at))

    def accept(self, live: LiveSequence, draw: Draw, now: float) -> None:
        """Takes one drawn token: emits its text, and ends the sequence if this is its last token. If the grammar of the
        sequence fails, the request fails."""
        request = live.request
        live.tokens.append(draw.token)
        self._send_scores(live)
        request.first_token_at = request.first_token_at or now
        request.completion_tokens += 1
        request.recomputed = 0
        self.counters.generation_tokens += 1
        with self.scope.covering([request]):
            try:
                delta = live.text.accept(draw.token)
            except GrammarError as error:
                self.fail(request, error)
                return
        self._emit(request, _output(live.index, draw, delta))
        if delta.finish_reason is not None:
            self._end(live)
        else:
            live.drop_free_grammar()

    def prefilled(self, live: LiveSequence) -> None:
        """Call this when a prompt is computed from which no token is drawn. Sends its scores and ends the sequence."""
        self._send_scores(live)
        self.finish_if_nothing_to_do(live)

    def add_scores(self, live: LiveSequence, start: int, scores: list[TokenLogprob]) -> None:
        """Keeps the logprobs of the prompt tokens from `start` on. A preempted prompt is scored again."""
        if live.scores is not None:
            live.scores[start:] = scores

    def add_pooled(self, live: LiveSequence, start: int, stop: int, part: Vector) -> None:
        """Adds what the chunk from `start` to `stop` gives to the pooled hidden states of a prompt. Its last chunk ends
        the sequence. A preempted prompt is pooled again from its start."""
        if live.status is SequenceStatus.FINISHED:
            return
        begins = start == 0 or live.pooling is Pooling.LAST
        live.pooled = part if begins or live.pooled is None else live.pooled + part
        if stop == live.prompt_length:
            live.request.recomputed = 0
            tokens = live.prompt_length if live.pooling is Pooling.MEAN else 1
            self._emit(live.request, SequencePooled(live.index, (live.pooled / tokens).astype("<f4").tobytes()))
            self._end(live)

    def finish_if_nothing_to_do(self, live: LiveSequence) -> None:
        """Ends a sequence if its `max_tokens` is 0, unless its prompt has yet to be scored. If none of its tokens is to
        be, as in a prompt of one token, it is scored already."""
        if live.scores is not None and live.scored_from >= live.prompt_length:
            self._send_scores(live)
        if live.max_tokens == 0 and live.scores is None:
            self._emit(live.request, SequenceOutput(live.index, (), "", finish_reason=FinishReason.LENGTH))
            self._end(live)

    def _send_scores(self, live: LiveSequence) -> None:
        if live.scores is not None:
            live.scored = False
            prompt_index = live.index // live.request.request.n
            self._emit(live.request, PromptScored(prompt_index, tuple(live.scores)))
            live.scores = None

    def _end(self, live: LiveSequence) -> None:
        """Ends a sequence and frees its row. If it was the last one of its request, the request ends too."""
        request = live.request
        del self._lives[live.sequence_id]
        request.unfinished.remove(live)
        if not request.unfinished:
            self._adapters.remove_request(request.request.adapter)
        with self.scope.covering([request]):
            self._scheduler.finish(live)
        if not request.unfinished and self._requests.pop(request.request_id, None) is not None:
            self._emit(request, request.finished(time.monotonic()))

    # -- events ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Publishes the events since the last call."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _emit(self, request: LiveRequest, event: Event) -> None:
        self._events.append((request.request_id, event))

    def check_integrity(self) -> None:
        """Raises AssertionError if requests and sequences do not agree."""
        assert {s.sequence_id for s in self._scheduler.sequences()} == set(self._lives)
        assert sum(len(request.unfinished) for request in self._requests.values()) == len(self._lives)


def _output(index: int, draw: Draw, delta: TextDelta) -> SequenceOutput:
    return SequenceOutput(
        index=index,
        token_ids=(draw.token,),
        text=delta.text,
        logprobs=() if draw.logprob is None else (draw.logprob,),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        sampling_logprobs=() if draw.sampling_logprob is None else (draw.sampling_logprob,),
    )
