"""The load-time check of an architecture that no test proves: the pool's rows against solo runs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.model.families import Standing, check_offsets
from mlx_parallm.model.manager import SharedModelManager


def check_unproved(manager: SharedModelManager, runner: BatchRunner) -> None:
    """Runs two rows of different lengths through the pool, unless the family is proved.

    Raises:
        UnsupportedModelError: they differ from their solo runs, or cannot run.
    """
    if manager.family.standing is not Standing.PROVED:
        check_offsets(manager.model, lambda *rows: _batched(runner, *rows), manager.card.vocab_size)


def _batched(runner: BatchRunner, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> mx.array:
    """Implements `families.BatchedForward` on the pool."""
    rows = [runner.cache.allocate(len(p) + len(c)) for p, c in zip(prompts, continuations, strict=True)]
    live = [row for row in rows if row is not None]
    try:
        runner.prefill(list(zip(live, prompts, strict=True)))
        return mx.stack([runner.forward(live, tokens) for tokens in zip(*continuations, strict=True)], axis=1)
    finally:
        for row in live:
            runner.cache.free(row)
