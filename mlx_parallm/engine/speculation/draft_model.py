"""DraftModel guesses the next tokens of rows with a smaller model, which has a KV pool of its own.

    sequence     t₀ … t₉₉            t₁₀₀ is drawn, not computed
    draft row    t₀ … t₉₉ ─ t₁₀₀ ─▶ g₁ ─▶ g₂ ─▶ g₃      one pass for each guess, for all rows together

A draft row is opened with the first guess, and computes the tokens before it in chunks. What it has computed of wrong
guesses is truncated before the next one. Memory is taken from draft rows before any row of the base model gives way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.engine.cost import Chunk, CostModel
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.speculation.choosing import LONGEST_DRAFT
from mlx_parallm.kv.row import KVRow

_log = logging.getLogger(__name__)

_TOGETHER = 8
"""Tokens that a draft row may be behind when it guesses. Those before them are computed in chunks of their own."""

_LONGEST_CHUNK = 512
"""Tokens of a chunk at most, so that its arrays stay small."""

_REST = 128
"""Units without guesses after memory was short, and after the first fault. Each further fault doubles it."""

_MOST_DOUBLINGS = 10


class DraftRoot(NamedTuple):
    """Draft rows share cached prefixes if their requests have the same salt. The draft model uses no adapter."""

    salt: str


@dataclass(eq=False, kw_only=True)
class _DraftRow(KVRow):
    """The row of a sequence in the draft model's KV pool.

    `after`: how many tokens the sequence had when the last guess was drawn. `guess`: that guess.
    """

    sequence: Sequence
    after: int = 0
    guess: list[int] = field(default_factory=list)

    @property
    def root(self) -> DraftRoot:
        return DraftRoot(self.sequence.request.spec.cache_salt)

    @property
    def is_current(self) -> bool:
        """Whether the guess follows the sequence's last token."""
        return bool(self.guess) and self.after == len(self.sequence.tokens)

    @property
    def right(self) -> int:
        """How many tokens of the guess the sequence has drawn since."""
        drawn = self.sequence.tokens[self.after :]
        pairs = enumerate(zip(self.guess, drawn, strict=False))
        return next((place for place, (one, other) in pairs if one != other), min(len(self.guess), len(drawn)))

    @property
    def behind(self) -> int:
        """How many of the sequence's tokens it has not computed."""
        return len(self.sequence.tokens) - self.computed


class DraftModel:
    """Owns the draft model's runner and its rows. Device thread only.

    Attributes:
        cost: predicts the seconds of its passes, and is corrected by those that they take.

    Args:
        runner: of the draft model, with a KV pool for draft rows only.
        cost: as it was measured.
        vocab_size: width of the base model's logits. Wider logits of the draft model are cut.
        draft_vocab_size: width of the draft model's logits.
        for_adapters: the draft model is the base model itself, so it guesses only for rows with an adapter.
    """

    def __init__(
        self,
        runner: BatchRunner,
        cost: CostModel,
        vocab_size: int,
        draft_vocab_size: int,
        for_adapters: bool = False,
    ) -> None:
        self.cost = cost
        self._runner = runner
        self._cache = runner.cache
        self._vocab_size = min(vocab_size, draft_vocab_size)
        self._for_adapters = for_adapters
        self._rows: dict[Sequence, _DraftRow] = {}
        self._rests = 0  # units without guesses that are left
        self._faults = 0  # since the last guess
        self._give_back = self._cache.device.give_back
        self._cache.device.give_back = self._give_way

    # -- rows ------------------------------------------------------------------------------------

    def begin_unit(self, rows: Collection[Sequence]) -> None:
        """Call it before each unit with the rows that are live. Closes the draft rows of all others."""
        self._rests = max(0, self._rests - 1)
        ended = self._rows.keys() - set(rows)
        for row in ended:
            self._close(row)
        if ended and not self._rows:
            self._cache.tidy(self._cache.device.budget_bytes, quiet=True)

    def guesses_for(self, row: Sequence) -> bool:
        """Whether it may be asked for a guess for this row now."""
        fits = len(row.tokens) + LONGEST_DRAFT <= self._cache.longest_row
        return not self._rests and fits and (row.adapter_slot != 0 or not self._for_adapters)

    def _close(self, row: Sequence) -> None:
        self._cache.close(self._rows.pop(row))

    # -- guesses ---------------------------------------------------------------------------------

    def draw(self, tokens: Mapping[Sequence, int], seconds: float) -> dict[Sequence, Seq[int]]:
        """Guesses so many tokens for each of these rows, the most probable ones.

        Args:
            seconds: for so long, rows may compute the tokens that they are behind. Those that stay behind get no guess.
        """
        until = time.monotonic() + seconds
        ready = [draft for row in tokens if (draft := self._ready(row, until)) is not None]
        if drawing := [draft for draft in ready if not draft.is_current]:
            self._draw(drawing, [tokens[draft.sequence] for draft in drawing])
            self._faults = 0
        if self._cache.device.excess > 0:
            self._give_way()
        return {draft.sequence: draft.guess for draft in ready}

    def _ready(self, row: Sequence, until: float) -> _DraftRow | None:
        """The draft row of a sequence, if it has a guess already, or can guess now."""
        draft = self._opened(row)
        return draft if draft is not None and (draft.is_current or self._has_caught_up(draft, until)) else None

    def _opened(self, row: Sequence) -> _DraftRow | None:
        """The draft row of a sequence, with room for a guess and without wrong tokens. None if memory is short."""
        length = len(row.tokens) + LONGEST_DRAFT
        if row not in self._rows:
            draft = _DraftRow(sequence=row)
            if self._cache.open(length, draft.root, row.tokens, into=draft) is None:
                return None
            self._rows[row] = draft
        draft = self._rows[row]
        if draft.is_current:
            return draft
        true = min(draft.computed, draft.after + draft.right, len(row.tokens) - 1) if draft.guess else draft.computed
        if true < draft.computed:
            self._cache.truncate(draft, true)
        draft.guess = []
        if not self._cache.extend(draft, length):
            self._close(row)
            return None
        return draft

    def _has_caught_up(self, draft: _DraftRow, until: float) -> bool:
        """Computes a chunk of the tokens that a draft row is behind. Returns whether it can guess."""
        left = until - time.monotonic()
        if draft.behind > _TOGETHER and left > 0.0:
            self._cache.take_over(draft, draft.root, draft.sequence.tokens)
        if draft.behind > _TOGETHER and left > 0.0:
            most = min(draft.behind - 1, _LONGEST_CHUNK)
            self._compute(draft, self.cost.tokens_within(left, draft.computed, min(_TOGETHER, most), most))
        return draft.behind <= _TOGETHER

    def _compute(self, draft: _DraftRow, tokens: int) -> None:
        """Computes the next tokens of a sequence, and registers its full blocks in the prefix cache."""
        span = Span(draft, draft.computed, tokens)
        self._runner.last_logits([span], self._inputs([span]))
        mx.eval(self._cache.arrays())
        draft.computed = span.stop
        self._cache.freeze(draft, draft.root, draft.sequence.tokens)
        self._cache.release_windows(draft)

    def _draw(self, drafts: Seq[_DraftRow], counts: Seq[int]) -> None:
        """Sets the guesses of these rows: so many tokens of each. Each pass is built while the one before runs."""
        started = time.monotonic()
        wanted = dict(zip(drafts, counts, strict=True))
        passes = [self._first_pass(drafts)]
        for place in range(1, max(counts)):
            mx.async_eval(passes[-1][1])  # type: ignore[no-untyped-call]
            passes.append(self._next_pass([draft for draft in drafts if wanted[draft] > place], *passes[-1]))
            self._runner.wait()
        mx.eval(passes[-1][1])
        for draft in drafts:
            draft.after = len(draft.sequence.tokens)
        for rows, tokens in passes:
            for draft, token in zip(rows, np.asarray(tokens), strict=True):
                draft.guess.append(int(token))
        now = time.monotonic()
        work = [Chunk(1, draft.computed) for draft in drafts]
        self.cost.observe(work, len(drafts), (now - started) / len(passes), now)

    def _first_pass(self, drafts: Iterable[_DraftRow]) -> _Pass:
        """Computes the tokens that the rows are behind, and draws the next one of each."""
        spans = in_order([Span(draft, draft.computed, draft.behind) for draft in drafts])
        return self._pass(spans, self._inputs(spans))

    def _next_pass(self, drafts: Iterable[_DraftRow], before: Seq[_DraftRow], tokens: mx.array) -> _Pass:
        """Computes the tokens that the pass before has drawn for these rows, and draws the next ones."""
        spans = in_order([Span(draft, draft.computed, 1) for draft in drafts])
        place = {draft: number for number, draft in enumerate(before)}
        return self._pass(spans, tokens[mx.array([place[span.row] for span in spans])])

    def _pass(self, spans: Seq[Span[_DraftRow]], inputs: mx.array) -> _Pass:
        logits = self._runner.last_logits(spans, inputs)
        for span in spans:
            span.row.computed = span.stop
        return [span.row for span in spans], logits[:, : self._vocab_size].argmax(axis=-1).astype(mx.uint32)

    def _inputs(self, spans: Iterable[Span[_DraftRow]]) -> mx.array:
        """The tokens of spans. One that the draft model does not have, because its vocabulary is padded less, is
        replaced by its last one, which costs nothing but a worse guess."""
        tokens = (token for span in spans for token in span.row.sequence.tokens[span.start : span.stop])
        return mx.array([min(token, self._vocab_size - 1) for token in tokens], mx.uint32)

    # -- faults and memory -----------------------------------------------------------------------

    def reset(self) -> None:
        """Drops all rows and arrays after a fault, and guesses nothing for a while."""
        self._rows.clear()
        self._runner.clear()
        self._rests = _REST << min(self._faults, _MOST_DOUBLINGS)
        self._faults += 1
        _log.warning("the draft model failed; nothing is guessed with it for the next %d units", self._rests)

    def _give_way(self) -> None:
        """Frees memory that others need: free blocks and cached prefixes, or else all rows."""
        self._give_back()
        if self._cache.device.excess > 0 and self._rows:
            for row in list(self._rows):
                self._close(row)
            self._rests = _REST
            self._give_back()

    def tidy(self) -> bool:
        """While the machine is short of memory, gives back some of it. Returns whether more is left to do."""
        cache = self._cache
        return not cache.device.keeps_prefixes and cache.tidy(cache.device.budget_bytes, quiet=not self._rows)

    def leave(self) -> None:
        """Ends the sharing of memory, when the base model is unloaded."""
        self._cache.device.leave()

    @property
    def bytes_held(self) -> int:
        """Bytes of its KV pool, free blocks included."""
        return self._cache.bytes_held + self._cache.bytes_cached

    def check_integrity(self) -> None:
        """Raises AssertionError if its rows and its KV pool disagree."""
        self._cache.check_integrity()
        assert set(map(id, self._rows.values())) == set(map(id, self._cache.rows))


_Pass = tuple[list[_DraftRow], mx.array]
"""The rows of a pass in order, and the tokens that it draws: lazy, uint32 [rows]."""
