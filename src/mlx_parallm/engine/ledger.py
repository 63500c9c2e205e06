"""The live requests: from submission to their one terminal event, and what each drawn token leads to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.runner import Draw
from mlx_parallm.core import (
    AdapterRef,
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    SequenceOutput,
    WorkClass,
)
from mlx_parallm.engine.blame import Blame
from mlx_parallm.engine.live import LiveRequest, LiveSequence, Vocabulary, expand
from mlx_parallm.engine.snapshot import Counters
from mlx_parallm.engine.text import TextDelta
from mlx_parallm.errors import GrammarError, QueueTimeoutError
from mlx_parallm.scheduler.rl_aware import RLAwareScheduler
from mlx_parallm.scheduler.sequence import Sequence

Publish = Callable[[list[tuple[str, Event]]], None]


class Ledger:
    """Requests and sequences by id, and the events of the unit that is running. Device thread only.

    Args:
        lives: live sequences by id, shared with whoever gives them rows.
        blame: told which request is being worked for.
        publish: takes the events of one unit, in order, with the ids of their requests.
    """

    def __init__(
        self,
        lives: dict[int, LiveSequence],
        blame: Blame,
        vocabulary: Vocabulary,
        scheduler: RLAwareScheduler,
        adapters: AdapterStore,
        publish: Publish,
    ) -> None:
        self.counters = Counters()
        self.blame = blame
        self._lives = lives
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._adapters = adapters
        self._publish = publish
        self._requests: dict[str, LiveRequest] = {}
        self._events: list[tuple[str, Event]] = []
        self._next_id = 0

    # -- requests --------------------------------------------------------------------------------

    def open(self, request: GenerationRequest) -> LiveRequest:
        """Queues a request's sequences."""
        live = LiveRequest(request, time.monotonic())
        self._requests[request.request_id] = live
        with self.blame.on([live]):
            live.unfinished = expand(live, self._vocabulary, self._next_id)
        self._next_id += request.sequences
        self._adapters.hold(request.adapter)
        self.counters.prompt_tokens += sum(map(len, request.prompts))
        for sequence in tuple(live.unfinished):
            self._lives[sequence.sequence.sequence_id] = sequence
            self._scheduler.add(sequence.sequence)
        return live

    def abort(self, request_id: str) -> None:
        """Frees everything a request holds. Nothing is published: nobody listens any more."""
        live = self._requests.pop(request_id, None)
        if live is None:
            return
        self.counters.aborted += 1
        for sequence in tuple(live.unfinished):
            self._end(sequence)

    def fail(self, request: LiveRequest, error: Exception) -> bool:
        """Ends a request with `error`; its rows are free at once. False when it had ended before."""
        if self._requests.pop(request.request_id, None) is None:
            return False
        for live in tuple(request.unfinished):
            self._end(live)
        self._emit(request, RequestFailed(error))
        return True

    def fail_overdue(self, arrived_before: float) -> None:
        """Fails live requests that arrived before then and that the device has not begun with. Rollouts may wait."""
        for request in tuple(self._requests.values()):
            if request.arrived_at >= arrived_before:
                return  # they are kept in order of arrival
            if request.request.work_class is WorkClass.INFERENCE and not request.begun:
                waited = time.monotonic() - request.arrived_at
                self.fail(request, QueueTimeoutError(f"The request waited {waited:.0f} s in the queue; try again."))

    def fail_all(self, error: Exception) -> None:
        for request in tuple(self._requests.values()):
            self.fail(request, error)

    def live(self, sequence: Sequence) -> LiveSequence:
        return self._lives[sequence.sequence_id]

    def lives(self) -> Collection[LiveSequence]:
        return self._lives.values()

    def of_adapter(self, ref: AdapterRef) -> list[LiveRequest]:
        return [request for request in self._requests.values() if request.request.adapter == ref]

    # -- what happens to a sequence --------------------------------------------------------------

    def accept(self, live: LiveSequence, draw: Draw, now: float) -> None:
        """A token was drawn: text, events, and the end when it is one, or when its grammar gives up."""
        request = live.request
        live.sequence.tokens.append(draw.token)
        if live.row is not None and live.sequence.unread == 0:
            live.row.input_token = draw.token
        request.first_token_at = request.first_token_at or now
        request.completion_tokens += 1
        request.recomputed = 0
        self.counters.generation_tokens += 1
        with self.blame.on([request]):
            try:
                delta = live.text.accept(draw.token)
            except GrammarError as error:
                self.fail(request, error)
                return
        self._emit(request, _output(live.index, draw, delta))
        if delta.finish_reason is not None:
            self._end(live)

    def prefilled(self, live: LiveSequence) -> None:
        """A prompt is computed: its scores are sent, and it ends if it draws nothing."""
        self._send_scores(live)
        self.finish_if_nothing_to_do(live)

    def finish_if_nothing_to_do(self, live: LiveSequence) -> None:
        """Ends a sequence that draws nothing (max_tokens 0), once its prompt is scored if it is to be."""
        sequence = live.sequence
        if live.scores is not None and sequence.prompt_length == 1:
            self._send_scores(live)
        if sequence.max_tokens == 0 and live.scores is None:
            self._emit(live.request, SequenceOutput(live.index, (), "", finish_reason=FinishReason.LENGTH))
            self._end(live)

    def _send_scores(self, live: LiveSequence) -> None:
        if live.scores is not None:
            live.sequence.scored = False
            prompt_index = live.index // live.request.request.n
            self._emit(live.request, PromptScored(prompt_index, tuple(live.scores)))
            live.scores = None

    def _end(self, live: LiveSequence) -> None:
        """Frees a sequence's row and closes its request when it was the last."""
        request = live.request
        if live.sequence.started_at:
            request.started_at = min(request.started_at or live.sequence.started_at, live.sequence.started_at)
        self._scheduler.finish(live.sequence)
        del self._lives[live.sequence.sequence_id]
        request.unfinished.remove(live)
        if request.unfinished:
            return
        self._adapters.let_go(request.request.adapter)
        if self._requests.pop(request.request_id, None):
            self._emit(request, request.finished(time.monotonic()))

    # -- events ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Publishes what has been said since the last time."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _emit(self, request: LiveRequest, event: Event) -> None:
        self._events.append((request.request_id, event))

    def check_integrity(self) -> None:
        """Raises AssertionError when requests and sequences do not agree."""
        assert {s.sequence_id for s in self._scheduler.sequences()} == set(self._lives)
        assert sum(len(request.unfinished) for request in self._requests.values()) == len(self._lives)
        for live in self._lives.values():
            assert live.row is None or live.row.kv.length == live.sequence.computed


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
