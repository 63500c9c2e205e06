"""Rows of a batch runner that decode without a scheduler, for benchmarks that time the runner alone."""

from collections.abc import Sequence as Seq

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from mlx_parallm.batch.runner import BatchRunner, Launched, Pending
from mlx_parallm.batch.sampling import RowSampling
from mlx_parallm.batch.spans import Span
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.engine.sequence import PromptGroup, Sequence


def open_row(runner: BatchRunner, context: int, room: int, slot: int, sampling: SamplingParams, token: int) -> Sequence:
    """A row with `context` tokens in the KV pool and room for `room` more. The keys and values are never computed."""
    row = Sequence(tokens=[], max_tokens=room, arrived_at=0.0, group=PromptGroup())
    row.sampling = RowSampling(sampling)
    opened = runner.cache.open(context + room, into=row)
    assert opened is not None, "the KV pool is too small"
    rewind(row, context, slot, token)
    return row


def rewind(row: Sequence, context: int, slot: int, token: int) -> None:
    """Sets a row back to `context` computed tokens; `token` is the next one."""
    row.tokens = [token] * (context + 1)
    row.prompt_length, row.computed, row.sampled, row.adapter_slot = context + 1, context, 0, slot


def begin(runner: BatchRunner, rows: Seq[Sequence], previous: Launched | None) -> Pending:
    """Begins a decode step, and counts its tokens as the scheduler would."""
    pending = runner.begin([Span(row, row.computed, 1) for row in rows], rows, previous)
    for row in rows:
        row.computed += 1
        row.sampled += 1
    return pending
