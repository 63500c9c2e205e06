"""A request and its sequences while the engine computes them.

core.Sequence        counts, class, age            what the scheduler reads
└─ batch.Row         blocks, slot, sampling        what a forward pass reads
   └─ LiveSequence   request, text, scores         one object
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from mlx_parallm.batch.logit_stages import TokenCounts, has_penalties
from mlx_parallm.batch.pooling import Vector
from mlx_parallm.batch.runner import Row
from mlx_parallm.batch.sampler import RowSampling
from mlx_parallm.batch.token_bans import BadWords
from mlx_parallm.core import (
    GenerationRequest,
    PromptGroup,
    RequestFinished,
    Sequence,
    TokenLogprob,
)
from mlx_parallm.engine.speculation.guesses import RowGuesses
from mlx_parallm.engine.text import Detokenizes, StopMatcher, TextStream


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of the tokenizer that the engine uses.

    `detokenizer`: makes the detokenizer of one sequence, from its prompt and the special tokens to write as text.
    """

    size: int
    eos_ids: frozenset[int]
    detokenizer: Callable[[tuple[int, ...], frozenset[int]], Detokenizes]


@dataclass(eq=False, kw_only=True)
class LiveSequence(Row):
    """One choice of a request, with all of its state: counts, row, sampling and text.

    `scores`: the prompt's logprobs so far, None for the tokens that are not scored. The list itself is None if the
    request does not want them or they have been sent. `pooled`: the pooled hidden states of the prompt as far as it is
    computed; for the mean, their sum. `counts_lookup`: tokens that the row gets from the prefix cache count as hits.
    False if the prompt was looked up before, for another sequence or before a preemption. `guesses`: those of its next
    tokens; None until the first one.
    """

    index: int
    request: LiveRequest
    text: TextStream
    scores: list[TokenLogprob | None] | None = None
    pooled: Vector | None = None
    counts_lookup: bool = False
    guesses: RowGuesses | None = None

    def forget_unread(self) -> None:
        """Takes back tokens that were drawn but will never be read, so that they are drawn again.

        Token counts for penalties are rebuilt from the tokens that were read, because the counts on the device may be
        lost.
        """
        super().forget_unread()
        self.draft_sampling = ()
        self.count_again()

    def drop_free_grammar(self) -> None:
        """Lets the row be sampled without its grammar once that allows any text."""
        if (grammar := self.sampling.grammar) is not None and grammar.free:
            self.sampling, self.text.grammar = replace(self.sampling, grammar=None), None

    def count_again(self) -> None:
        """Counts the tokens for penalties again, from those that were read."""
        if (counts := self.sampling.counts) is not None:
            prompt, generated = self.tokens[: self.prompt_length], self.tokens[self.prompt_length :]
            self.sampling = replace(self.sampling, counts=TokenCounts(prompt, generated, counts.vocab_size))


@dataclass(eq=False, slots=True)
class LiveRequest:
    """The state of one request. Times are in seconds of `time.monotonic`; 0 means that it has not happened yet.

    `unfinished`: its sequences that have not ended. `recomputed`: how often faults made it start again since its last
    token. `looked_up`: the prompts that were looked up in the prefix cache, by index. `cached_tokens`: how many tokens
    of these prompts were found.
    """

    request: GenerationRequest
    arrived_at: float
    unfinished: list[LiveSequence] = field(default_factory=list)
    first_token_at: float = 0.0
    started_at: float = 0.0
    completion_tokens: int = 0
    recomputed: int = 0
    looked_up: set[int] = field(default_factory=set)
    cached_tokens: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def finished(self, now: float) -> RequestFinished:
        return RequestFinished(
            prompt_tokens=sum(map(len, self.request.prompts)),
            completion_tokens=self.completion_tokens,
            arrived_at=self.arrived_at,
            started_at=self.started_at or now,
            first_token_at=self.first_token_at or now,
            finished_at=now,
            cached_tokens=self.cached_tokens,
        )


def live_sequence(
    owner: LiveRequest, index: int, sequence_id: int, group: PromptGroup, vocabulary: Vocabulary
) -> LiveSequence:
    """Choice `index` of a request, with everything that it needs to be computed and turned into text."""
    request = owner.request
    stopping, prompt, sample = request.stopping, request.prompts[index // request.n], index % request.n
    params = replace(request.sampling, seed=request.sampling.seed + sample)
    grammar = None if request.grammar is None else request.grammar.start()
    scored = request.prompt_logprobs is not None and sample == 0
    tokens, scored_from = list(prompt), max(1, request.scored_from)
    return LiveSequence(
        sequence_id=sequence_id,
        tokens=tokens,
        max_tokens=stopping.max_tokens if request.pooling is None else 1,  # the vector counts as a draw
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
        index=index,
        request=owner,
        text=TextStream(
            detokenizer=vocabulary.detokenizer(prompt, request.visible_specials),
            matcher=StopMatcher(stopping),
            stopping=stopping,
            end_ids=frozenset() if stopping.ignore_eos else vocabulary.eos_ids,
            grammar=grammar,
            tokens=tokens,
        ),
        scores=[None] * min(scored_from, len(prompt)) if scored else None,
    )


def live(sequence: Sequence) -> LiveSequence:
    """The sequence as the engine knows it. All sequences of the engine's scheduler are live sequences."""
    assert isinstance(sequence, LiveSequence)
    return sequence


class Work(Protocol):
    """Work on the device that belongs to no request: that of `AdapterStore`, `GRPOTrainer` or `DraftModel`."""

    def reset(self) -> None:
        """Gives up what failed, and everything that it left half done on the device."""


Affected = tuple[tuple[LiveRequest, ...], Work | None]
"""What a fault affects: these requests, or this work."""


class FaultScope:
    """Records for which requests or work MLX is being called, so that a fault fails only those. Device thread only."""

    def __init__(self) -> None:
        self._affected: Affected = ((), None)

    @contextmanager
    def covering(self, requests: Iterable[LiveRequest] = (), work: Work | None = None) -> Iterator[None]:
        """A fault in this block affects these requests or this work. If the block raises, they stay recorded until
        `take`."""
        before, self._affected = self._affected, (tuple(requests), work)
        yield
        self._affected = before

    def take(self) -> Affected:
        """Returns the recorded requests or work, and clears the record."""
        affected, self._affected = self._affected, ((), None)
        return affected
