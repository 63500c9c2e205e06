"""One unit of prefill, run for its live sequences."""

from __future__ import annotations

from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.engine.ledger import Ledger
from mlx_parallm.scheduler.units import PrefillPart, PrefillUnit


def run(unit: PrefillUnit, runner: BatchRunner, ledger: Ledger) -> None:
    """Computes the keys and values of its chunks, and the logprobs of a scored prompt. Raises whatever the forward
    raises."""
    if unit.parts[0].sequence.scored:
        _score(unit.parts[0], runner, ledger)
    else:
        runner.prefill([_chunk(part, ledger) for part in unit.parts])


def _score(part: PrefillPart, runner: BatchRunner, ledger: Ledger) -> None:
    live = ledger.live(part.sequence)
    row, chunk = _chunk(part, ledger)
    tokens, start = part.sequence.tokens, part.sequence.computed
    assert live.scores is not None
    del live.scores[start + 1 :]  # a preempted prompt is scored again from its start
    targets = tokens[start + 1 : start + part.tokens + 1]
    live.scores += runner.score(row, chunk, targets, live.request.request.prompt_logprobs or 0)


def _chunk(part: PrefillPart, ledger: Ledger) -> tuple[KVRow, list[int]]:
    row, start = ledger.live(part.sequence).row, part.sequence.computed
    assert row is not None
    return row.kv, part.sequence.tokens[start : start + part.tokens]
