"""Chooses the chunks of prompts for one forward unit: the guarantee of progress, and the packing.

A step is a unit with decode rows. The guarantee: between two chunks of a prompt that has a row, at most 7 steps run
without a chunk of it. It counts steps and uses no prediction, so it holds even when the cost model is wrong.
Predictions only size chunks and order prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlx_parallm.engine.cost import Chunk, CostModel
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.units import UnitSpan
from mlx_parallm.engine.waiting import PromptKind, prompt_kind

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


@dataclass(frozen=True, slots=True)
class ChunkPacker:
    """Packs chunks of prompts into one unit, with at most `max_tokens` tokens or one token for each overdue prompt."""

    cost: CostModel
    max_tokens: int

    def pack(
        self,
        prompts: list[Sequence],
        late: list[Sequence],
        allowance: float,
        at_least_one: bool,
        pooling: float = math.inf,
    ) -> list[UnitSpan]:
        """The next chunks of `prompts`, which make a unit about `allowance` seconds longer.

        Overdue prompts first get a small share each, whatever the predicted time. The rest goes to prompts in their
        order. A prompt whose logprobs are wanted is the only one.

        Args:
            prompts: in the order in which they are served.
            late: the overdue prompts, which must be in the unit; scored ones first.
            at_least_one: if no prompt is overdue, the first one gets at least the smallest chunk.
            pooling: what is left of the share of prompts whose hidden states are pooled, in seconds. If anything is
                left, they may use the whole allowance, because small chunks cost much more per token.
        """
        if late and prompt_kind(late[0]) is PromptKind.SCORED:
            prompts, late, at_least_one = late[:1], [], True
        shares = self._shares(late)
        unit = _Chunks(self.cost, allowance, self.max_tokens, pooling)
        for prompt, tokens in shares.items():
            unit.put(prompt, tokens)
        for prompt in filter(unit.may_hold, prompts):
            limited = prompt.pooling is not None and math.isfinite(pooling)
            tokens = self._chunk_tokens(prompt, unit, at_least_one and not unit.tokens and not limited)
            if tokens:
                unit.put(prompt, tokens)
            elif not limited:
                break
        return [
            UnitSpan(prompt, prompt.computed, tokens, in_turn=tokens > shares.get(prompt, 0))
            for prompt, tokens in unit.tokens.items()
        ]

    def _shares(self, late: list[Sequence]) -> dict[Sequence, int]:
        """Tokens that overdue prompts get in any case: one smallest chunk together, or a smallest share each."""
        count = max(len(late), 1)
        share = min(max(_MIN_SHARE, _MIN_CHUNK // count), max(self.max_tokens // count, 1))
        return {prompt: min(share, prompt.longest_chunk) for prompt in late}

    def _chunk_tokens(self, prompt: Sequence, unit: _Chunks, must_fit: bool) -> int:
        """How many tokens of `prompt` the unit holds beside the other prompts: at least its share, if it has one, and
        0 when no chunk fits. With `must_fit`, at least the smallest chunk, whatever the predicted time."""
        share = unit.tokens.get(prompt, 0)
        seconds, room = unit.left_for(prompt)
        longest = min(self.max_tokens, _longest_scored(prompt)) if prompt.scored else self.max_tokens
        most = min(prompt.longest_chunk, room, longest)
        least = share or min(_MIN_CHUNK, prompt.longest_chunk, longest)
        if not share:
            too_long = self.cost.chunk_seconds(Chunk(least, prompt.computed)) > seconds
            if most < least or (too_long and not must_fit):
                return 0
        return self.cost.tokens_within(seconds, prompt.computed, least, max(least, most))


class _Chunks:
    """The chunks of one unit while they are chosen. `tokens`: the length of each prompt's chunk."""

    def __init__(self, cost: CostModel, seconds: float, max_tokens: int, pooling_seconds: float) -> None:
        self.tokens: dict[Sequence, int] = {}
        self._cost = cost
        self._seconds_left = seconds
        self._pooling_left = pooling_seconds
        self._tokens_left = max_tokens
        self._kinds: Counter[PromptKind] = Counter()

    def may_hold(self, prompt: Sequence) -> bool:
        """Whether the unit may hold a chunk of this prompt beside the others that it holds."""
        kind = prompt_kind(prompt)
        if prompt in self.tokens or not self.tokens:
            return True
        if PromptKind.SCORED in (kind, *self._kinds):
            return False
        return kind is PromptKind.SHORT or self._kinds[PromptKind.LONG] < MAX_CHUNKS

    def put(self, prompt: Sequence, tokens: int) -> None:
        """Sets the length of a prompt's chunk."""
        self._kinds[prompt_kind(prompt)] += prompt not in self.tokens
        more = tokens - self.tokens.get(prompt, 0)
        seconds = self._seconds(prompt, tokens) - self._seconds(prompt, tokens - more)
        self._seconds_left -= seconds
        self._pooling_left -= seconds if prompt.pooling is not None else 0.0
        self._tokens_left -= more
        self.tokens[prompt] = tokens

    def left_for(self, prompt: Sequence) -> tuple[float, int]:
        """Seconds and tokens that are left for this prompt beside the others."""
        tokens = self.tokens.get(prompt, 0)
        may_use = prompt.pooling is None or self._pooling_left > 0.0
        left = self._seconds_left if may_use else 0.0
        return left + self._seconds(prompt, tokens), self._tokens_left + tokens

    def _seconds(self, prompt: Sequence, tokens: int) -> float:
        return self._cost.chunk_seconds(Chunk(tokens, prompt.computed))
