"""Requests: keeps each request and its sequences, from the request's submission to its last event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.batch.runner import Vector
from mlx_parallm.batch.sampling import BadWords, RowSampling, SampledToken, TokenCounts, has_penalties
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    Pooling,
    PromptScored,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SequenceOutput,
    SequencePooled,
    TokenLogprob,
    WorkClass,
)
from mlx_parallm.engine.faults import Affecting, explained
from mlx_parallm.engine.scheduler import RLAwareScheduler
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.stats import Counters
from mlx_parallm.engine.text import StopMatcher, TextStream, Vocabulary
from mlx_parallm.errors import GrammarError, QueueTimeoutError

_log = logging.getLogger(__name__)

PublishEvents = Callable[[list[tuple[str, Event]]], None]
"""Publishes the events of one unit of work, in order, each with the id of its request."""


@dataclass(eq=False, slots=True)
class Request:
    """The state of one request. Times are in seconds of `time.monotonic`; 0 means that it has not happened yet.

    `spec`: what was asked for. `unfinished`: its sequences that have not ended. `recomputed`: how often faults made it
    start again since its last token. `looked_up`: the prompts that were looked up in the prefix cache, by index.
    `cached_tokens`: how many tokens of these prompts were found.
    """

    spec: GenerationRequest
    arrived_at: float
    unfinished: list[Sequence] = field(default_factory=list)
    first_token_at: float = 0.0
    started_at: float = 0.0
    completion_tokens: int = 0
    recomputed: int = 0
    looked_up: set[int] = field(default_factory=set)
    cached_tokens: int = 0


class Requests:
    """Holds requests by id, with their sequences, and the events of the current unit of work. Device thread only."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheduler: RLAwareScheduler,
        adapters: AdapterStore,
        publish: PublishEvents,
    ) -> None:
        self.counters = Counters()
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._adapters = adapters
        self._publish = publish
        self._requests: dict[str, Request] = {}
        self._events: list[tuple[str, Event]] = []

    # -- requests --------------------------------------------------------------------------------

    def open(self, request: GenerationRequest) -> Request:
        """Adds a request and queues its sequences. If they cannot be made, it fails alone: that is done in Python, so
        no array can be wrong, and the error is not that of a forward unit in flight."""
        opened = Request(request, time.monotonic())
        self._requests[request.request_id] = opened
        groups = [PromptGroup() for _ in request.prompts]
        try:
            opened.unfinished = [
                _sequence(opened, index, groups[index // request.n], self._vocabulary)
                for index in range(request.sequences)
            ]
        except Exception as error:  # noqa: BLE001 - a grammar or a tokenizer may raise anything
            _log.exception("a request could not be opened")
            self.fail(opened, explained(error))
            return opened
        self._adapters.add_request(request.adapter)
        self.counters.prompt_tokens += sum(map(len, request.prompts))
        for sequence in opened.unfinished:
            self._scheduler.add(sequence)
        return opened

    def abort(self, request_id: str) -> None:
        """Frees everything that a request holds. Publishes nothing, because its client is gone."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.counters.aborted += 1
        for sequence in tuple(request.unfinished):
            self._end(sequence)

    def fail(self, request: Request, error: Exception) -> bool:
        """Ends a request with `error` and frees its rows. Returns False if it has ended already."""
        running = self._requests.pop(request.spec.request_id, None) is not None
        if running:
            self._emit(request, RequestFailed(error))
        for sequence in tuple(request.unfinished):  # some are left if a fault has ended an earlier call
            self._end(sequence)
        return running

    def goes_on(self, request: Request) -> bool:
        """Whether a request has not ended, and has sequences that can start again."""
        return bool(request.unfinished) and request.spec.request_id in self._requests

    def fail_overdue(self, arrived_before: float) -> None:
        """Fails inference requests that arrived before this time and have not begun. Rollouts may wait."""
        for request in tuple(self._requests.values()):
            if request.arrived_at >= arrived_before:
                return  # requests are in order of arrival
            if request.spec.work_class is WorkClass.INFERENCE and not request.started_at:
                waited = time.monotonic() - request.arrived_at
                self.fail(request, QueueTimeoutError(f"The request waited {waited:.0f} s in the queue; try again."))

    def fail_all(self, error: Exception, adapter: AdapterRef | None = None) -> None:
        """Fails all requests, or those of one adapter."""
        for request in tuple(self._requests.values()):
            if adapter in (None, request.spec.adapter):
                self.fail(request, error)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have not ended."""
        return [sequence for request in self._requests.values() for sequence in request.unfinished]

    # -- sequences -------------------------------------------------------------------------------

    def started(self, sequences: Iterable[Sequence]) -> None:
        """Call this when a forward unit with these sequences was launched."""
        for sequence in sequences:
            request = sequence.request
            if not request.started_at:
                request.started_at = sequence.started_at
                self._emit(request, RequestStarted(request.arrived_at, request.started_at))

    def accept(self, sequence: Sequence, sample: SampledToken, now: float) -> None:
        """Takes one sampled token: emits its text, and ends the sequence if this is its last token. If the grammar of
        the sequence fails, the request fails."""
        request = sequence.request
        sequence.tokens.append(sample.token)
        if sequence.scores is not None:
            self._send_scores(sequence)
        request.first_token_at = request.first_token_at or now
        request.completion_tokens += 1
        request.recomputed = 0
        self.counters.generation_tokens += 1
        with Affecting([request]):
            try:
                delta = sequence.text.accept(sample.token)
            except GrammarError as error:
                self.fail(request, error)
                return
        output = SequenceOutput(
            index=sequence.index,
            token_ids=(sample.token,),
            text=delta.text,
            logprobs=() if sample.logprob is None else (sample.logprob,),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            sampling_logprobs=() if sample.sampling_logprob is None else (sample.sampling_logprob,),
        )
        self._events.append((request.spec.request_id, output))
        if delta.finish_reason is not None:
            self._end(sequence)
        elif sequence.sampling.grammar is not None:
            sequence.drop_free_grammar()

    def add_scores(self, sequence: Sequence, start: int, scores: list[TokenLogprob]) -> None:
        """Keeps the logprobs of the prompt tokens from `start` on. A preempted prompt is scored again."""
        if sequence.scores is not None:
            sequence.scores[start:] = scores

    def add_pooled(self, sequence: Sequence, start: int, stop: int, part: Vector) -> None:
        """Adds what the chunk from `start` to `stop` gives to the pooled hidden states of a prompt. Its last chunk ends
        the sequence. A preempted prompt is pooled again from its start."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        begins = start == 0 or sequence.pooling is Pooling.LAST
        sequence.pooled = part if begins or sequence.pooled is None else sequence.pooled + part
        if stop == sequence.prompt_length:
            sequence.request.recomputed = 0
            tokens = sequence.prompt_length if sequence.pooling is Pooling.MEAN else 1
            self._emit(
                sequence.request, SequencePooled(sequence.index, (sequence.pooled / tokens).astype("<f4").tobytes())
            )
            self._end(sequence)

    def finish_prompt(self, sequence: Sequence) -> None:
        """Sends the scores of a prompt if all of its tokens are computed, or none is to be scored. Then it ends a
        sequence that samples no token. Call it at the start too, because a prompt of one token is scored already."""
        is_scored = sequence.to_compute == 0 or sequence.scored_from >= sequence.prompt_length
        if sequence.scores is not None and is_scored:
            self._send_scores(sequence)
        if sequence.max_tokens == 0 and sequence.scores is None:
            self._emit(sequence.request, SequenceOutput(sequence.index, (), "", finish_reason=FinishReason.LENGTH))
            self._end(sequence)

    def _send_scores(self, sequence: Sequence) -> None:
        prompt_index = sequence.index // sequence.request.spec.n
        self._emit(sequence.request, PromptScored(prompt_index, tuple(sequence.scores or ())))
        sequence.scored, sequence.scores = False, None

    def _end(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its row. If it was the last one of its request, the request ends too."""
        request = sequence.request
        request.unfinished.remove(sequence)
        if not request.unfinished:
            self._adapters.remove_request(request.spec.adapter)
        with Affecting([request]):
            self._scheduler.finish(sequence)
        if not request.unfinished and self._requests.pop(request.spec.request_id, None) is not None:
            now = time.monotonic()
            finished = RequestFinished(
                prompt_tokens=sum(map(len, request.spec.prompts)),
                completion_tokens=request.completion_tokens,
                arrived_at=request.arrived_at,
                started_at=request.started_at or now,
                first_token_at=request.first_token_at or now,
                finished_at=now,
                cached_tokens=request.cached_tokens,
            )
            self._emit(request, finished)

    # -- events ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Publishes the events since the last call."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _emit(self, request: Request, event: Event) -> None:
        self._events.append((request.spec.request_id, event))

    def check_integrity(self) -> None:
        """Raises AssertionError if requests and the scheduler have different sequences."""
        assert set(self._scheduler.sequences()) == set(self.sequences)


def _sequence(owner: Request, index: int, group: PromptGroup, vocabulary: Vocabulary) -> Sequence:
    """Choice `index` of a request, with everything that it needs to be computed and turned into text."""
    request = owner.spec
    stopping, prompt, sample = request.stopping, request.prompts[index // request.n], index % request.n
    params = replace(request.sampling, seed=request.sampling.seed + sample)
    grammar = None if request.grammar is None else request.grammar.start()
    scored = request.prompt_logprobs is not None and sample == 0
    tokens, scored_from = list(prompt), max(1, request.scored_from)
    sequence = Sequence(
        tokens=tokens,
        max_tokens=stopping.max_tokens if request.pooling is None else 1,  # the vector counts as a sample
        arrived_at=owner.arrived_at,
        group=group,
        work_class=request.work_class,
        adapter=request.adapter,
        priority=request.priority,
        key=request.key,
        scored=scored,
        scored_from=scored_from,
        pooling=request.pooling,
        prompt_candidates=request.prompt_logprobs or 0,
        candidates=params.top_logprobs or 0,
        sampling=RowSampling(
            params=params,
            min_tokens=stopping.min_tokens,
            end_ids=tuple(sorted(vocabulary.eos_ids.union(stopping.stop_token_ids))),
            sampling_logprobs=request.collection is not None,
            counts=TokenCounts(prompt, (), vocabulary.size) if has_penalties(params) else None,
            grammar=grammar,
            bad_words=BadWords(params.bad_words, tokens, len(prompt)) if params.bad_words else None,
        ),
        scores=[None] * min(scored_from, len(prompt)) if scored else None,
    )
    sequence.request, sequence.index = owner, index
    sequence.text = TextStream(
        detokenizer=vocabulary.detokenizer(prompt, request.visible_specials),
        matcher=StopMatcher(stopping),
        stopping=stopping,
        end_ids=frozenset() if stopping.ignore_eos else vocabulary.eos_ids,
        grammar=grammar,
        tokens=tokens,
    )
    return sequence
