"""A request and its sequences while they are in the engine: one object each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mlx_parallm.batch.penalties import TokenCounts, has_penalties
from mlx_parallm.batch.runner import Row
from mlx_parallm.batch.sampler import RowSampling
from mlx_parallm.core import GenerationRequest, GrammarState, RequestFinished, TokenLogprob
from mlx_parallm.engine.text import Detokenizes, TextStream
from mlx_parallm.scheduler.sequence import Group, Sequence


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine needs of the tokenizer. `detokenizer` makes one for a sequence with that prompt, and with these
    special tokens as text."""

    size: int
    eos_ids: frozenset[int]
    detokenizer: Callable[[tuple[int, ...], frozenset[int]], Detokenizes]


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One choice of a request. `row` exists while it holds a place in the pool.

    `scores` collects prompt logprobs (the first token has none); None when they are not wanted, or sent.
    """

    sequence: Sequence
    index: int
    request: LiveRequest
    text: TextStream
    sampling: RowSampling
    row: Row | None = None
    scores: list[TokenLogprob | None] | None = None

    def forget_unread(self) -> None:
        """Takes back the draws that were launched and will never be read; they will be drawn again. Penalties start
        from the tokens that were read: what was counted on the device may be lost."""
        sequence = self.sequence
        sequence.drawn -= sequence.unread
        if (counts := self.sampling.counts) is not None:
            prompt, generated = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
            self.sampling = replace(self.sampling, counts=TokenCounts(prompt, generated, counts.vocab_size))


@dataclass(eq=False, slots=True)
class LiveRequest:
    """Books of one request: `unfinished` are its sequences that have not ended.

    `recomputed`: times that it started again after a fault, since its last token.
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
        """Whether the device has begun with any of its sequences."""
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


def expand(live: LiveRequest, vocabulary: Vocabulary, first_id: int) -> list[LiveSequence]:
    """The request's sequences, `n` for each prompt, numbered from `first_id`."""
    request, sequences = live.request, []
    for prompt_index, prompt in enumerate(request.prompts):
        group = Group()
        for sample in range(request.n):
            index = prompt_index * request.n + sample
            sequence = _sequence(request, prompt, group, first_id + index, live.arrived_at)
            sequences.append(_live_sequence(live, sequence, index, sample, vocabulary))
    return sequences


def _sequence(request: GenerationRequest, prompt: tuple[int, ...], group: Group, number: int, now: float) -> Sequence:
    return Sequence(
        sequence_id=number,
        tokens=list(prompt),
        max_tokens=request.stopping.max_tokens,
        arrived_at=now,
        group=group,
        work_class=request.work_class,
        adapter=request.adapter,
        priority=request.priority,
    )


def _live_sequence(
    live: LiveRequest, sequence: Sequence, index: int, sample: int, vocabulary: Vocabulary
) -> LiveSequence:
    request = live.request
    prompt = request.prompts[index // request.n]
    grammar = None if request.grammar is None else request.grammar.start()
    scored = request.prompt_logprobs is not None and sample == 0
    sequence.scored = scored
    return LiveSequence(
        sequence=sequence,
        index=index,
        request=live,
        text=TextStream(vocabulary.detokenizer(prompt, request.spelled), request.stopping, vocabulary.eos_ids, grammar),
        sampling=_row_sampling(request, prompt, sample, vocabulary, grammar),
        scores=[None] if scored else None,
    )


def _row_sampling(
    request: GenerationRequest,
    prompt: tuple[int, ...],
    sample: int,
    vocabulary: Vocabulary,
    grammar: GrammarState | None,
) -> RowSampling:
    params = replace(request.sampling, seed=request.sampling.seed + sample)
    return RowSampling(
        params=params,
        min_tokens=request.stopping.min_tokens,
        end_ids=tuple(sorted(vocabulary.eos_ids)),
        sampling_logprobs=request.collection is not None,
        counts=TokenCounts(prompt, (), vocabulary.size) if has_penalties(params) else None,
        grammar=grammar,
    )
