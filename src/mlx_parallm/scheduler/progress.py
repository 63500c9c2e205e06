"""The guarantee that every prompt with a row gets on: at most 7 decode steps run between two chunks of it.

It counts steps and asks no prediction. Each prompt that is being prefilled counts the decode steps since its last
chunk; before the eighth it gets one, whatever the unit is expected to take. When many prompts are near their limit
their chunks are spread over the steps that are left, so that no single gap between two steps holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mlx_parallm.scheduler.sequence import Sequence

MOST_STEPS = 8
"""A prompt's next chunk comes before so many decode steps have run since its last one."""

_EASY_PACE = 4
"""Overdue prompts that one gap takes without being spread: their least chunks together are one small unit."""


def overdue(prompts: Iterable[Sequence], within: int = 1, spread: bool = False) -> list[Sequence]:
    """The prompts that must get a chunk before the next decode step, longest wait first.

    Args:
        prompts: those that are being prefilled.
        within: how many decode steps may run before a prompt's limit, for it to count.
        spread: also take some of the prompts that could still wait, if later gaps would become crowded.
    """
    by_wait = sorted(prompts, key=lambda prompt: -prompt.steps_waited)
    left = [max(MOST_STEPS - prompt.steps_waited, 1) for prompt in by_wait]
    at_limit = sum(steps <= within for steps in left)
    return by_wait[: max(at_limit, _due_now(left) if spread else 0)]


def _due_now(left: list[int]) -> int:
    """How many prompts to serve in this gap, so that the gaps that are left are enough for all at an even pace.

    `left[i]`: decode steps before the i-th prompt's limit, ascending. With the (i+1) most urgent prompts to be served
    within `left[i]` gaps, the pace is the largest (i+1) / left[i]; what later gaps cannot take at that pace is due now.
    """
    pace = max([_EASY_PACE, *(math.ceil((i + 1) / steps) for i, steps in enumerate(left))])
    return max([0, *(i + 1 - pace * (steps - 1) for i, steps in enumerate(left))])
