"""Chooses the chunks of prompts for one prefill unit: the cost model, the 8-step guarantee, and the packing.

The guarantee: at most 7 decode steps run between two chunks of a prompt that has a row. It counts steps and uses no
prediction, so it holds even when the cost model is wrong. Predictions only size units and order prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_parallm.core import SequenceState
from mlx_parallm.scheduler.units import Chunk, PrefillPart

# ---- the cost model ----------------------------------------------------------------------------

_NEWEST_RATIO = 0.2
"""Weight of the newest observation in the running scale while observations come often."""

_MEMORY_S = 30.0
"""After this many seconds without an observation, the next one gets a weight of about two thirds."""

_MIN_RATIO, _MAX_RATIO = 0.1, 10.0
"""Bounds of one observation against the measured terms, so that one outlier cannot spoil the scale."""


@dataclass(slots=True)
class CostModel:
    """Predicts the seconds of a prefill unit: fixed + the sum over its chunks of per_token·T + per_pair·T·(C + T/2).

    T is a chunk's tokens and C its context. The first term stands for reading the weights, the second for the matrix
    products, the third for attention. The engine measures the terms at start; the defaults are a rough guess. `scale`
    is the running ratio of observed seconds to those that the measured terms give. Prefill units and decode steps both
    correct it, so it follows the load of the machine within seconds.

    A decode step does the work of a prefill unit of one-token chunks, and it also samples. `step_ratio` is a running
    average: how many times as long as that unit the step takes at the same speed of the machine. It is learnt from
    pairs of a decode step and the prefill unit after it. Before the first pair it is None, and decode steps do not
    correct the scale.
    """

    fixed: float = 0.01
    per_token: float = 1e-4
    per_pair: float = 1e-8
    scale: float = 1.0
    step_ratio: float | None = None
    _last_step: float | None = None  # ratio of the newest decode step since the last prefill unit
    _observed_at: float | None = None

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """Predicted seconds of a unit of these chunks."""
        work = sum(
            self.per_token * chunk.tokens + self.per_pair * chunk.tokens * (chunk.context + chunk.tokens / 2)
            for chunk in chunks
        )
        return self.scale * (self.fixed + work)

    def tokens_within(self, seconds: float, beside: Sequence[Chunk], context: int, least: int, most: int) -> int:
        """The largest chunk, in tokens, that fits into a unit of `seconds` together with the chunks `beside`.

        Args:
            context: tokens that the new chunk attends to.
            least, most: bounds of the result; `least` is returned when nothing fits.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds((*beside, Chunk(middle, context))) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe_prefill(self, chunks: Iterable[Chunk], seconds: float, now: float) -> None:
        """Corrects the scale by a prefill unit that took `seconds` and ended at `now`."""
        ratio = self._ratio(chunks, seconds)
        if self._last_step is not None:
            paired = self._last_step / ratio
            self.step_ratio = paired if self.step_ratio is None else _average(self.step_ratio, paired, _NEWEST_RATIO)
            self._last_step = None
        self._correct_scale(ratio, seconds, now)

    def observe_step(self, chunks: Iterable[Chunk], seconds: float, now: float) -> None:
        """Corrects the scale by a decode step, given as one-token chunks, that took `seconds` and ended at `now`."""
        self._last_step = self._ratio(chunks, seconds)
        if self.step_ratio is not None:
            self._correct_scale(self._last_step / self.step_ratio, seconds, now)

    def _ratio(self, chunks: Iterable[Chunk], seconds: float) -> float:
        """The observed seconds of one unit, divided by those that the measured terms give; within bounds."""
        return min(max(self.scale * seconds / self.seconds(chunks), _MIN_RATIO), _MAX_RATIO)

    def _correct_scale(self, ratio: float, seconds: float, now: float) -> None:
        """Moves the scale towards the ratio of one unit. The older the last observation, the less the old scale counts.

        There is one scale for all terms, because load, heat and clock rate change them alike.
        """
        idle = 0.0 if self._observed_at is None else now - seconds - self._observed_at
        weight = max(_NEWEST_RATIO, 1.0 - math.exp(-idle / _MEMORY_S))
        self.scale = _average(self.scale, ratio, weight)
        self._observed_at = now


def _average(running: float, newest: float, weight: float) -> float:
    """A running average after one more observation."""
    return running + weight * (newest - running)


# ---- the guarantee of progress -----------------------------------------------------------------

MAX_STEPS_WITHOUT_CHUNK = 8
"""A prompt gets its next chunk before this many decode steps have run since its last one."""

_EASY_PACE = 4
"""One gap between decode steps can serve this many overdue prompts: their smallest chunks make one small unit."""


def overdue(prompts: Iterable[SequenceState], within: int = 1, spread: bool = False) -> list[SequenceState]:
    """The prompts that must get a chunk before the next decode step, longest wait first.

    Args:
        prompts: sequences that are being prefilled.
        within: a prompt counts when at most so many decode steps may run before its limit.
        spread: also include prompts that could still wait, if the gaps between later decode steps would be crowded.
    """
    by_wait = sorted(prompts, key=lambda prompt: -prompt.steps_waited)
    steps_left = [max(MAX_STEPS_WITHOUT_CHUNK - prompt.steps_waited, 1) for prompt in by_wait]
    at_limit = sum(steps <= within for steps in steps_left)
    return by_wait[: max(at_limit, _due_now(steps_left) if spread else 0)]


def _due_now(steps_left: list[int]) -> int:
    """How many prompts this gap must serve so that the later gaps can serve all others at an even pace.

    A gap is the time between two decode steps. `steps_left[i]` is the number of decode steps before the i-th prompt's
    limit, in ascending order. So the i+1 most urgent prompts have `steps_left[i]` gaps, this one included, and the pace
    is the largest (i+1) / steps_left[i]. What the later gaps cannot serve at that pace is due now.
    """
    pace = max([_EASY_PACE, *(math.ceil((i + 1) / steps) for i, steps in enumerate(steps_left))])
    return max([0, *(i + 1 - pace * (steps - 1) for i, steps in enumerate(steps_left))])


# ---- packing -----------------------------------------------------------------------------------

_MIN_CHUNK = 16
"""Smallest prefill unit in tokens: below it the fixed cost of a unit dominates."""

_MIN_SHARE = 4
"""Smallest chunk in tokens when several overdue prompts share one unit."""

_MAX_SCORED_CHUNK = 256
"""Largest chunk in tokens of a prompt whose logprobs are wanted: its logits are [tokens, vocabulary] in fp32."""


@dataclass(frozen=True, slots=True)
class PrefillPacker:
    """Packs chunks of prompts into one unit of at most `max_tokens` tokens."""

    cost: CostModel
    max_tokens: int

    def pack(
        self, prompts: Sequence[SequenceState], overdue: Sequence[SequenceState], allowance: float
    ) -> list[PrefillPart]:
        """The next chunks of `prompts`, in their order, in about `allowance` seconds.

        Overdue prompts first get a small share each, whatever the predicted time. If none is overdue, the first prompt
        gets at least the smallest chunk. A prompt whose logprobs are wanted is alone in its unit. The result is empty
        only if `prompts` is.

        Args:
            prompts: in the order in which they are served.
            overdue: the prompts that must be in the unit, as many as `max_tokens` allows, most overdue first.
        """
        if overdue and overdue[0].scored:
            return self._fill(overdue[:1], {}, allowance)
        return self._fill(prompts, self._shares(overdue), allowance)

    def seconds(self, parts: Iterable[PrefillPart]) -> float:
        """Predicted seconds of a unit of these parts."""
        return self.cost.seconds([part.chunk for part in parts])

    def _shares(self, overdue: Sequence[SequenceState]) -> dict[SequenceState, int]:
        """Tokens that overdue prompts get in any case: one smallest chunk together, or a smallest share each."""
        share = max(_MIN_SHARE, _MIN_CHUNK // max(len(overdue), 1))
        shares: dict[SequenceState, int] = {}
        for prompt in overdue:
            tokens = min(share, prompt.to_prefill, self.max_tokens - sum(shares.values()))
            if tokens > 0 and not prompt.scored:
                shares[prompt] = tokens
        return shares

    def _fill(
        self, prompts: Iterable[SequenceState], shares: dict[SequenceState, int], allowance: float
    ) -> list[PrefillPart]:
        """Enlarges the shares, and adds other prompts in their order, while the allowance lasts."""
        tokens = dict(shares)
        for prompt in prompts:
            beside = {other: count for other, count in tokens.items() if other is not prompt}
            taken = self._chunk_tokens(prompt, beside, shares.get(prompt, 0), allowance)
            if taken == 0:
                break
            tokens[prompt] = taken
            if prompt.scored:
                break
        return [PrefillPart(each, count, in_turn=count > shares.get(each, 0)) for each, count in tokens.items()]

    def _chunk_tokens(
        self, prompt: SequenceState, beside: dict[SequenceState, int], share: int, allowance: float
    ) -> int:
        """How many tokens of `prompt` fit beside the others: at least `share`, or 0 when no chunk fits."""
        if beside and prompt.scored:
            return 0
        room = self.max_tokens - sum(beside.values())
        most = min(prompt.to_prefill, room, _MAX_SCORED_CHUNK if prompt.scored else room)
        least = share or min(_MIN_CHUNK, prompt.to_prefill, self.max_tokens)
        if most < least:
            return 0
        chunks = [Chunk(tokens, other.computed) for other, tokens in beside.items()]
        if beside and not share and self.cost.seconds([*chunks, Chunk(least, prompt.computed)]) > allowance:
            return 0
        return self.cost.tokens_within(allowance, chunks, prompt.computed, least, most)
