"""A request and its sequences while the engine computes them, and the rows of the KV pool that they hold.

LiveRequest ──unfinished──▶ LiveSequence ──row──▶ Row (a place in the KV pool, and the adapter slot it reads)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.logit_stages import TokenCounts, has_penalties
from mlx_parallm.batch.runner import Row
from mlx_parallm.batch.sampler import RowSampling
from mlx_parallm.core import (
    DeviceWork,
    GenerationRequest,
    PromptGroup,
    RequestFinished,
    SequenceState,
    TokenLogprob,
)
from mlx_parallm.engine.text import Detokenizes, StopMatcher, TextStream


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of the tokenizer that the engine uses.

    `detokenizer`: makes the detokenizer of one sequence, from its prompt and the special tokens to write as text.
    """

    size: int
    eos_ids: frozenset[int]
    detokenizer: Callable[[tuple[int, ...], frozenset[int]], Detokenizes]


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One choice of a request. `row` is None while the sequence holds no row of the KV pool.

    `scores`: the prompt's logprobs so far, None for the first token. The list itself is None if the request does not
    want them or they have been sent.
    """

    sequence: SequenceState
    index: int
    request: LiveRequest
    text: TextStream
    sampling: RowSampling
    row: Row | None = None
    scores: list[TokenLogprob | None] | None = None

    def forget_unread(self) -> None:
        """Takes back tokens that were drawn but will never be read, so that they are drawn again.

        Token counts for penalties are rebuilt from the tokens that were read, because the counts on the device may be
        lost.
        """
        sequence = self.sequence
        sequence.drawn -= sequence.unread
        if (counts := self.sampling.counts) is not None:
            prompt, generated = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
            self.sampling = replace(self.sampling, counts=TokenCounts(prompt, generated, counts.vocab_size))


@dataclass(eq=False, slots=True)
class LiveRequest:
    """The state of one request. Times are in seconds of `time.monotonic`; 0 means that it has not happened yet.

    `unfinished`: its sequences that have not ended. `recomputed`: how often faults made it start again since its last
    token.
    """

    request: GenerationRequest
    arrived_at: float
    unfinished: list[LiveSequence] = field(default_factory=list)
    first_token_at: float = 0.0
    started_at: float = 0.0
    completion_tokens: int = 0
    recomputed: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def begun(self) -> bool:
        """Whether any of its sequences has begun to prefill."""
        return bool(self.started_at) or any(live.sequence.started_at for live in self.unfinished)

    def finished(self, now: float) -> RequestFinished:
        return RequestFinished(
            prompt_tokens=sum(map(len, self.request.prompts)),
            completion_tokens=self.completion_tokens,
            arrived_at=self.arrived_at,
            started_at=self.started_at or now,
            first_token_at=self.first_token_at or now,
            finished_at=now,
        )


def live_sequence(
    live: LiveRequest, index: int, sequence_id: int, group: PromptGroup, vocabulary: Vocabulary
) -> LiveSequence:
    """Choice `index` of a request, with everything that it needs to be computed and turned into text."""
    request = live.request
    stopping, prompt, sample = request.stopping, request.prompts[index // request.n], index % request.n
    params = replace(request.sampling, seed=request.sampling.seed + sample)
    grammar = None if request.grammar is None else request.grammar.start()
    scored = request.prompt_logprobs is not None and sample == 0
    return LiveSequence(
        sequence=SequenceState(
            sequence_id=sequence_id,
            tokens=list(prompt),
            max_tokens=stopping.max_tokens,
            arrived_at=live.arrived_at,
            group=group,
            work_class=request.work_class,
            adapter=request.adapter,
            priority=request.priority,
            scored=scored,
        ),
        index=index,
        request=live,
        text=TextStream(
            detokenizer=vocabulary.detokenizer(prompt, request.visible_specials),
            matcher=StopMatcher(stopping),
            stopping=stopping,
            end_ids=frozenset() if stopping.ignore_eos else vocabulary.eos_ids,
            grammar=grammar,
        ),
        sampling=RowSampling(
            params=params,
            min_tokens=stopping.min_tokens,
            end_ids=tuple(sorted(vocabulary.eos_ids)),
            sampling_logprobs=request.collection is not None,
            counts=TokenCounts(prompt, (), vocabulary.size) if has_penalties(params) else None,
            grammar=grammar,
        ),
        scores=[None] if scored else None,
    )


Affected = tuple[tuple[LiveRequest, ...], DeviceWork | None]
"""What a fault affects: these requests, or the work of `AdapterStore` or `GRPOTrainer`."""


class FaultScope:
    """Records for which requests or work MLX is being called, so that a fault fails only those. Device thread only."""

    def __init__(self) -> None:
        self._affected: Affected = ((), None)

    @contextmanager
    def covering(self, requests: Iterable[LiveRequest] = (), work: DeviceWork | None = None) -> Iterator[None]:
        """A fault in this block affects these requests or this work. If the block raises, they stay recorded until
        `take`."""
        before, self._affected = self._affected, (tuple(requests), work)
        yield
        self._affected = before

    def take(self) -> Affected:
        """Returns the recorded requests or work, and clears the record."""
        affected, self._affected = self._affected, ((), None)
        return affected


class PoolMemory:
    """Implements `scheduler.RowMemory`: gives sequences rows of the KV pool.

    A row pins its adapter's slot for as long as it is in the pool. A fault while a row is made or grows fails that
    row's request only.

    Args:
        lives: live sequences by sequence id, owned by `LiveRequests`.
    """

    def __init__(
        self, cache: LoRABatchedKVCache, adapters: AdapterStore, lives: dict[int, LiveSequence], scope: FaultScope
    ) -> None:
        self.ready = adapters.ready
        self._cache = cache
        self._adapters = adapters
        self._lives = lives
        self._scope = scope

    def allocate(self, sequence: SequenceState, source: SequenceState | None) -> int | None:
        """Gives a sequence a row with room for all its tokens. Returns how many of them are computed in it already,
        which never includes the last one: the next step computes that. None if there is no room."""
        live = self._lives[sequence.sequence_id]
        with self._scope.covering([live.request]):
            if source is None:
                kv = self._cache.allocate(sequence.length)
            else:
                kv = self._cache.fork(self._row(source).kv, sequence.prompt_length - 1, sequence.length)
        if kv is None:
            return None
        kv.adapter_slot = self._adapters.pin(sequence.adapter)
        live.row = Row(kv, live.sampling, input_token=sequence.tokens[-1], drawn=sequence.drawn)
        return kv.length

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        kv = self._row(sequence).kv
        if tokens <= kv.capacity:
            return True
        with self._scope.covering([self._lives[sequence.sequence_id].request]):
            return self._cache.grow(kv, tokens)

    def free(self, sequence: SequenceState) -> None:
        self._cache.free(self._row(sequence).kv)
        self._adapters.unpin(sequence.adapter)
        self._lives[sequence.sequence_id].row = None

    def _row(self, sequence: SequenceState) -> Row:
        row = self._lives[sequence.sequence_id].row
        assert row is not None, f"sequence {sequence.sequence_id} has no row"
        return row
