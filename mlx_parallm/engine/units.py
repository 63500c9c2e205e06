"""Units of device work, and which chunks of prompts a forward unit has: the guarantee of progress, and the packing.

A step is a unit with decode rows. The guarantee: between two chunks of a prompt that has a row, at most 7 steps run
without a chunk of it. It counts steps and uses no prediction, so it holds even when the cost model is wrong.
Predictions only size chunks and order prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlx_parallm.batch.spans import Span
from mlx_parallm.engine.budget import Chunk, CostModel
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.waiting import PromptKind, prompt_kind

# ---- units -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitSpan(Span[Sequence]):
    """A span of a forward unit.

    `in_turn`: a prompt was served in the order of the queue, so it moves back in the queue. False when it got only the
    small share of an overdue prompt.
    """

    in_turn: bool = True

    @property
    def work(self) -> Chunk:
        """The span as the cost model sees it."""
        return Chunk(self.tokens, self.start)


@dataclass(frozen=True, slots=True)
class ForwardUnit:
    """One forward pass over the next tokens of several sequences.

    Attributes:
        spans: decode rows, oldest first, then the chunks of prompts.
        sampling: the sequences that sample a token at the end of the unit, or whose hidden states are all pooled by
            then, in the order of `spans`: all decode rows, and the prompts whose last chunk this is.
        decodes: the number of decode rows.
        drafts: draft tokens of decode rows that the unit computes and checks, besides the token of each row.
        delayed: staging or training ran since the last forward unit.
        growth: how many times as long it takes as a token of each of its decode rows would, as the cost model predicts
            it: because of drafts, and of tokens that are computed again after wrong ones.
    """

    spans: tuple[UnitSpan, ...]
    sampling: tuple[Sequence, ...]
    decodes: int
    delayed: bool = False
    drafts: int = 0
    growth: float = 1.0

    @property
    def rows(self) -> tuple[UnitSpan, ...]:
        """The decode rows: one token of each, its draft, and the tokens before it that its state is behind."""
        return self.spans[: self.decodes]

    @property
    def tokens_sampled(self) -> int:
        """The number of tokens that the unit samples: one after each token of a draft too."""
        return sum(sequence.pooling is None for sequence in self.sampling) + self.drafts

    @property
    def chunks(self) -> tuple[UnitSpan, ...]:
        """The chunks of prompts."""
        return self.spans[self.decodes :]

    @property
    def stage(self) -> str:
        """What it is, for people."""
        if self.decodes == len(self.spans):
            return f"decoding {self.decodes} sequences"
        return f"a prefill beside {self.decodes} decoding sequences" if self.decodes else "a prefill"


@dataclass(frozen=True, slots=True)
class StagingUnit:
    """Copies adapters into the bank for about `seconds`; at least one piece of that work runs."""

    seconds: float
    stage: ClassVar[str] = "loading an adapter"


@dataclass(frozen=True, slots=True)
class TrainingUnit:
    """Runs as much of a micro-step as fits into `seconds`."""

    seconds: float
    stage: ClassVar[str] = "a training step"


Unit = ForwardUnit | StagingUnit | TrainingUnit


# ---- the guarantee of progress -----------------------------------------------------------------

MAX_STEPS_WITHOUT_CHUNK = 8
"""A prompt gets its next chunk before this many steps have run since its last one."""

MAX_CHUNKS = 2
"""Most chunks of long prompts in one unit, because each of them is one more attention call in every layer. Chunks of
short prompts share one call. There are more only if more prompts than expected turn out to be long when they get their
rows, because what they share left the prefix cache; the guarantee of progress comes first."""

MOST_IN_PREFILL: Mapping[PromptKind, float] = {
    PromptKind.SHORT: math.inf,
    PromptKind.LONG: MAX_STEPS_WITHOUT_CHUNK,
    PromptKind.SCORED: 1,
}
"""How many prompts of each kind may be in prefill at a time; the others wait without a row.

With 8 long prompts, one chunk of each step keeps them all moving, and the other is left to the most urgent prompt. A
scored prompt is the only prompt in its units, so two of them would only take turns."""

MOST_POOLED, MOST_POOLED_BESIDE_ROWS = 32, 2
"""How many prompts whose hidden states are pooled may be in prefill at a time: in all, and while rows decode. Every
prompt in prefill has its guarantee of progress, so many of them would take more of a step than their share."""

Pace = Mapping[PromptKind, int]
"""How many overdue prompts of each kind one step can serve."""

EVEN: Pace = {PromptKind.SHORT: 4, PromptKind.LONG: 1, PromptKind.SCORED: 1}
"""Serves prompts before their limit, so that each step serves about as many of them."""

LATE: Pace = {PromptKind.SHORT: 16, PromptKind.LONG: MAX_CHUNKS, PromptKind.SCORED: 1}
"""Serves prompts as late as the guarantee allows, for steps whose budget of time is used up."""


def overdue(prompts: Iterable[Sequence], pace: Pace, steps: int = 1) -> list[Sequence]:
    """The prompts that must get a chunk in the next step. Scored ones come first, then those that waited longest.

    Args:
        prompts: sequences that are being prefilled.
        pace: how many of them each later step can serve.
        steps: also includes prompts that would be overdue in the steps after the next one, up to this many in all.
    """
    by_kind: dict[PromptKind, list[Sequence]] = {kind: [] for kind in (PromptKind.SCORED, *PromptKind)}
    for prompt in sorted(prompts, key=lambda prompt: -prompt.steps_waited):
        by_kind[prompt_kind(prompt)].append(prompt)
    # A scored prompt takes one step for itself, so the others have one step less.
    limit = MAX_STEPS_WITHOUT_CHUNK - bool(by_kind[PromptKind.SCORED])
    at_limit = sum(prompt.steps_waited == MAX_STEPS_WITHOUT_CHUNK - 1 for prompt in by_kind[PromptKind.LONG])
    return [
        *_overdue(by_kind[PromptKind.SCORED], MAX_STEPS_WITHOUT_CHUNK, pace[PromptKind.SCORED], steps),
        *_overdue(by_kind[PromptKind.LONG], limit, pace[PromptKind.LONG], steps)[: max(MAX_CHUNKS, at_limit)],
        *_overdue(by_kind[PromptKind.SHORT], limit, pace[PromptKind.SHORT], steps),
    ]


def _overdue(by_wait: list[Sequence], limit: int, pace: int, steps: int) -> list[Sequence]:
    """As many of these prompts of one kind, longest wait first, as these `steps` must serve so that the later ones can
    serve all others at an even pace, before they have waited for `limit` steps.

    The i+1 prompts that waited longest have `steps_left[i]` steps, the next one included. So the pace is the largest
    (i+1) / steps_left[i], or the given one if that is larger. What the later steps cannot serve at that pace is due.
    """
    steps_left = [max(limit - prompt.steps_waited, 1) for prompt in by_wait]
    pace = max([pace, *(math.ceil(count / left) for count, left in enumerate(steps_left, 1))])
    return by_wait[: max([0, *(count - pace * max(left - steps, 0) for count, left in enumerate(steps_left, 1))])]


# ---- packing -----------------------------------------------------------------------------------

_MIN_CHUNK = 16
"""Smallest chunk in tokens: below it a prompt's attention and bookkeeping cost more than its tokens."""

_MIN_SHARE = 4
"""Smallest chunk in tokens when several overdue prompts share one unit."""

_MAX_SCORED_CHUNK = 256
"""Largest chunk in tokens of a prompt whose logprobs are wanted: its logits are [tokens, vocabulary] in fp32."""

_MAX_SCORED_CANDIDATES = 2**16
"""Largest number of candidates that such a chunk reports, if it has more than one token: they are sorted and read."""


def _longest_scored(prompt: Sequence) -> int:
    """The largest chunk in tokens of a scored prompt."""
    return max(1, min(_MAX_SCORED_CHUNK, _MAX_SCORED_CANDIDATES // max(1, prompt.prompt_candidates)))


class ChunkPacker:
    """Packs chunks of prompts into one unit, with at most `max_tokens` tokens or one token for each overdue prompt.

    Args:
        seconds: the chunks make the unit about so much longer.
        pooling: what is left of the share of prompts whose hidden states are pooled, in seconds. If anything is left,
            they may use all of `seconds`, because small chunks cost much more per token.
    """

    def __init__(self, cost: CostModel, max_tokens: int, seconds: float, pooling: float = math.inf) -> None:
        self._cost = cost
        self._max_tokens = max_tokens
        self._seconds_left = seconds
        self._pooling_left = pooling
        self._pooling_is_limited = math.isfinite(pooling)
        self._tokens: dict[Sequence, int] = {}  # the length of each prompt's chunk
        self._kinds: Counter[PromptKind] = Counter()

    def pack(self, prompts: list[Sequence], late: list[Sequence], at_least_one: bool) -> list[UnitSpan]:
        """The next chunks of `prompts`.

        Overdue prompts first get a small share each, whatever the predicted time. The rest goes to prompts in their
        order. A prompt whose logprobs are wanted is the only one.

        Args:
            prompts: in the order in which they are served.
            late: the overdue prompts, which must be in the unit; scored ones first.
            at_least_one: if no prompt is overdue, the first one gets at least the smallest chunk.
        """
        if late and prompt_kind(late[0]) is PromptKind.SCORED:
            prompts, late, at_least_one = late[:1], [], True
        share = min(max(_MIN_SHARE, _MIN_CHUNK // max(len(late), 1)), max(self._max_tokens // max(len(late), 1), 1))
        for prompt in late:
            self._put(prompt, min(share, prompt.longest_chunk))
        shares = dict(self._tokens)
        for prompt in filter(self._may_hold, prompts):
            limited = prompt.pooling is not None and self._pooling_is_limited
            if tokens := self._chunk_tokens(prompt, at_least_one and not self._tokens and not limited):
                self._put(prompt, tokens)
            elif not limited:
                break
        return [
            UnitSpan(prompt, prompt.computed, tokens, in_turn=tokens > shares.get(prompt, 0))
            for prompt, tokens in self._tokens.items()
        ]

    def _may_hold(self, prompt: Sequence) -> bool:
        """Whether the unit may hold a chunk of this prompt beside the others that it holds."""
        kind = prompt_kind(prompt)
        if prompt in self._tokens or not self._tokens:
            return True
        if PromptKind.SCORED in (kind, *self._kinds):
            return False
        return kind is PromptKind.SHORT or self._kinds[PromptKind.LONG] < MAX_CHUNKS

    def _put(self, prompt: Sequence, tokens: int) -> None:
        """Sets the length of a prompt's chunk."""
        before = self._tokens.get(prompt, 0)
        self._kinds[prompt_kind(prompt)] += prompt not in self._tokens
        seconds = self._seconds(prompt, tokens) - self._seconds(prompt, before)
        self._seconds_left -= seconds
        self._pooling_left -= seconds if prompt.pooling is not None else 0.0
        self._tokens[prompt] = tokens

    def _chunk_tokens(self, prompt: Sequence, must_fit: bool) -> int:
        """How many tokens of `prompt` the unit holds beside the other prompts: at least its share, if it has one, and
        0 when no chunk fits. With `must_fit`, at least the smallest chunk, whatever the predicted time."""
        share = self._tokens.get(prompt, 0)
        may_use = prompt.pooling is None or self._pooling_left > 0.0
        seconds = (self._seconds_left if may_use else 0.0) + self._seconds(prompt, share)
        room = self._max_tokens - sum(self._tokens.values()) + share
        longest = min(self._max_tokens, _longest_scored(prompt)) if prompt.scored else self._max_tokens
        most = min(prompt.longest_chunk, room, longest)
        least = share or min(_MIN_CHUNK, prompt.longest_chunk, longest)
        if not share and (most < least or (self._seconds(prompt, least) > seconds and not must_fit)):
            return 0
        return self._cost.tokens_within(seconds, prompt.computed, least, max(least, most))

    def _seconds(self, prompt: Sequence, tokens: int) -> float:
        return self._cost.chunk_seconds(Chunk(tokens, prompt.computed))
