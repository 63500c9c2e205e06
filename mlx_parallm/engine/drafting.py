"""Drafts: tokens that are guessed for live sequences, so that one forward pass computes several tokens of a row.

    guess ─▶ the scheduler takes as much of it as pays ─▶ one pass draws a token after each ─▶ compare

    in the pass    The   cat   sat   on        "cat sat on" is guessed
    drawn after    cat   sat   in    ·         3 tokens: the last one shows that "on" was wrong

Each position draws with its own place in the row's random stream, exactly as without a draft, and its token is kept as
long as all guesses before it were right. So the same seed gives the same text; a wrong guess costs only time.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.core import SequenceStatus
from mlx_parallm.engine.guesses import RowGuesses
from mlx_parallm.engine.live import FaultScope, LiveSequence
from mlx_parallm.scheduler.drafts import MOST_TOKENS


def guess(rows: Iterable[LiveSequence], scope: FaultScope, in_block: bool = False) -> None:
    """Sets the `guess` of each row that decodes: the tokens that may follow those which have been read. A row that
    raises has its request recorded in `scope`.

    `in_block`: a row's draft ends where its block does, because blocks are quantized as they are left, and a block that
    wrong guesses have left could not be written again.
    """
    decoding = []
    for row in rows:
        row.guess = ()
        if row.status is SequenceStatus.RUNNING and not row.draws_alone and row.max_tokens - row.drawn > 1:
            decoding.append(row)
    if len(decoding) >= MOST_TOKENS:
        return
    for row in decoding:
        with scope.covering([row.request]):
            row.guesses = row.guesses or RowGuesses(row.tokens)
            guessed = row.guesses.guess(row.sampling.grammar)
            row.guess = guessed[: BLOCK_TOKENS - 1 - row.computed % BLOCK_TOKENS] if in_block else guessed
            row.acceptance = row.guesses.acceptance


def plan_draft(row: LiveSequence, scope: FaultScope) -> None:
    """Sets the sampling options after each token of a row's draft, if it has one, as `guess` does."""
    if row.drafted:
        with scope.covering([row.request]):
            row.draft_sampling = row.sampling.along(row.draft)


def compare(row: LiveSequence, guessed: int, drawn: int) -> bool:
    """Returns whether a guess was right, and remembers it for the next ones."""
    assert row.guesses is not None, "it has guessed"
    row.guesses.add(guessed == drawn)
    return guessed == drawn
