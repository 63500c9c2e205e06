"""Drafts: tokens that are guessed for live sequences, so that one forward pass computes several tokens of a row.

    guess ─▶ the scheduler takes as much of it as pays ─▶ one pass draws a token after each ─▶ compare

    in the pass    The   cat   sat   on        "cat sat on" is guessed
    drawn after    cat   sat   in    ·         3 tokens: the last one shows that "on" was wrong

Each position draws with its own place in the row's random stream, exactly as without a draft, and its token is kept as
long as all guesses before it were right. So the same seed gives the same text; a wrong guess costs only time.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from mlx_parallm.engine.cost import CostModel
from mlx_parallm.engine.faults import FaultScope
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.engine.speculation.choosing import MOST_TOKENS
from mlx_parallm.engine.speculation.draft_model import DraftModel
from mlx_parallm.engine.speculation.guesses import Acceptance, RowGuesses, Source
from mlx_parallm.kv.blocks import BLOCK_TOKENS

if TYPE_CHECKING:
    from mlx_parallm.engine.scheduler import RLAwareScheduler


class Drafting:
    """Guesses for the rows of one base model. A row that raises has its request recorded in `scope`.

    Args:
        sources: where guesses come from besides grammars.
        model: None if no draft model is used.
        in_block: a row's draft ends where its block does, because blocks are quantized as they are left, and a block
            that wrong guesses have left could not be written again.
    """

    def __init__(self, sources: frozenset[Source], scope: FaultScope, model: DraftModel | None, in_block: bool) -> None:
        self._sources = sources
        self._scope = scope
        self._model = model
        self._in_block = in_block
        self._acceptance = Acceptance()

    @property
    def model_cost(self) -> CostModel | None:
        """Predicts the passes of the draft model, if there is one."""
        return None if self._model is None else self._model.cost

    def guess(self, rows: Collection[Sequence]) -> None:
        """Sets the `guess` of each row that decodes, as far as it costs no pass: the tokens that may follow those which
        have been read."""
        if self._model is not None:
            with self._scope.covering(work=self._model):
                self._model.begin_unit(rows)
        decoding = []
        for row in rows:
            row.guess, row.model_acceptance = (), 0.0
            if row.status is SequenceStatus.RUNNING and not row.draws_alone and row.max_tokens - row.drawn > 1:
                decoding.append(row)
        if len(decoding) < MOST_TOKENS:
            for row in decoding:
                with self._scope.covering([row.request]):
                    self._guess(row)

    def _guess(self, row: Sequence) -> None:
        guesses = row.guesses = row.guesses or RowGuesses(row.tokens, self._sources, self._acceptance)
        self._set(row, guesses.guess(row.sampling.grammar))
        forced = row.guess and guesses.source is Source.GRAMMAR
        if self._model is not None and not forced and self._model.guesses_for(row):
            row.model_acceptance = guesses.model_acceptance

    def _set(self, row: Sequence, guess: Seq[int]) -> None:
        assert row.guesses is not None
        row.guess = guess[: BLOCK_TOKENS - 1 - row.computed % BLOCK_TOKENS] if self._in_block else guess
        row.acceptance = row.guesses.acceptance

    def draw_where_it_pays(self, scheduler: RLAwareScheduler) -> float:
        """Lets the draft model guess for the rows for which that pays. They wait for it. Returns for how long."""
        if self._model is None or not (tokens := scheduler.tokens_to_draw(self._model.cost)):
            return 0.0
        started = time.monotonic()
        with self._scope.covering(work=self._model):
            drawn = self._model.draw(tokens, min(scheduler.gap.chunk_s, scheduler.gap.remaining_s))
        for row, guess in drawn.items():
            with self._scope.covering([row.request]):
                assert row.guesses is not None
                self._set(row, row.guesses.take_from_model(guess, row.sampling.grammar))
        seconds = time.monotonic() - started
        scheduler.gap.add_wait_time(seconds)
        return seconds


def plan_draft(row: Sequence, scope: FaultScope) -> None:
    """Sets the sampling options after each token of a row's draft. If that raises, the row's request is recorded in
    `scope`."""
    with scope.covering([row.request]):
        row.draft_sampling = row.sampling.along(row.draft)


def compare(row: Sequence, guessed: int, drawn: int) -> bool:
    """Returns whether a guess was right, and remembers it for the next ones."""
    assert row.guesses is not None, "it has guessed"
    row.guesses.add(guessed == drawn)
    return guessed == drawn
