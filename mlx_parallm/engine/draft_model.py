"""DraftModel proposes the next tokens of sequences with a smaller model, which has a KV pool of its own.

    sequence     t₀ … t₉₉            t₁₀₀ is sampled, not computed
    draft row    t₀ … t₉₉ ─ t₁₀₀ ─▶ d₁ ─▶ d₂ ─▶ d₃      one pass for each token of the drafts, for all rows together

A draft row is opened with the first draft, and computes the tokens before it in chunks. What it has computed of wrong
drafts is truncated before the next one. Memory is taken from draft rows before any row of the base model gives way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.engine.budget import Chunk, CostModel
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.speculate import EXPECTED, LONGEST_DRAFT, Source
from mlx_parallm.kv.row import KVRow

_log = logging.getLogger(__name__)

_TOGETHER = 8
"""Tokens that a draft row may be behind when its draft is made. Those before them are computed in chunks of their
own."""

_LONGEST_CHUNK = 512
"""Tokens of a chunk at most, so that its arrays stay small."""

_REST = 128
"""Units without drafts after memory was short, and after the first fault. Each further fault doubles it."""

_MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a pass computes: lazy tokens [N], and for a prediction head the hidden states before them, [N, D]."""

    tokens: mx.array
    hidden: mx.array | None = None

    def at(self, places: Seq[int]) -> DraftInputs:
        """Those at some places."""
        chosen = mx.array(list(places))
        return DraftInputs(self.tokens[chosen], None if self.hidden is None else self.hidden[chosen])


@dataclass(eq=False, kw_only=True)
class DraftRow(KVRow):
    """The row of a sequence in the draft model's KV pool.

    `start`: the position in the sequence of the row's first token. `after`: how many tokens the sequence had when the
    last draft was made. `draft`: that draft. Draft rows share cached prefixes if their requests have the same salt; the
    draft model uses no adapter.
    """

    sequence: Sequence
    start: int = 0
    after: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def salt(self) -> str:
        return self.sequence.request.spec.cache_salt

    @property
    def is_current(self) -> bool:
        """Whether the draft follows the sequence's last token."""
        return bool(self.draft) and self.after == len(self.sequence.tokens)

    @property
    def behind(self) -> int:
        """How many of the sequence's tokens it has not computed."""
        return len(self.sequence.tokens) - self.start - self.computed

    @property
    def room(self) -> int:
        """For how many tokens it needs room: those of the sequence and of a draft."""
        return len(self.sequence.tokens) - self.start + LONGEST_DRAFT

    def tokens_of(self, span: Span[DraftRow]) -> Seq[int]:
        """The tokens of the sequence that a span of this row computes."""
        return self.sequence.tokens[self.start + span.start : self.start + span.stop]

    def right_tokens(self) -> int:
        """How many tokens at the beginning of the row are those of the sequence. The last one of the sequence is left
        to compute after a draft, because the next draft follows from its logits."""
        if not self.draft:
            return self.computed
        sampled = self.sequence.tokens[self.after :]
        pairs = enumerate(zip(self.draft, sampled, strict=False))
        right = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(self.draft), len(sampled)))
        return min(self.computed, self.after + right, len(self.sequence.tokens) - 1)


class DraftModel:
    """Owns the draft model's runner and its rows. Device thread only.

    Attributes:
        cost: predicts the seconds of its passes, and is corrected by those that they take.
        expected: share of right tokens before its first draft.

    Args:
        runner: of the draft model, with a KV pool for draft rows only.
        cost: as it was measured.
        vocab_size: width of the base model's logits. Wider logits of the draft model are cut.
        draft_vocab_size: width of the draft model's logits.
    """

    expected = EXPECTED[Source.MODEL]

    def __init__(self, runner: BatchRunner, cost: CostModel, vocab_size: int, draft_vocab_size: int) -> None:
        self.cost = cost
        self._runner = runner
        self._cache = runner.cache
        self._vocab_size = min(vocab_size, draft_vocab_size)
        self._rows: dict[Sequence, DraftRow] = {}
        self._rests = 0  # units without drafts that are left
        self._faults = 0  # since the last draft
        self._give_back = self._cache.device.give_back
        self._cache.device.give_back = self._give_way

    # -- drafts ----------------------------------------------------------------------------------

    def begin_unit(self, live: Collection[Sequence]) -> None:
        """Call it before each unit with the sequences that hold a row. Closes the draft rows of all others."""
        self._rests = max(0, self._rests - 1)
        ended = self._rows.keys() - set(live)
        for sequence in ended:
            self._close(sequence)
        if ended and not self._rows:
            self._cache.tidy(self._cache.device.budget_bytes, quiet=True)

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether it may be asked for a draft of this sequence now."""
        return not self._rests and len(sequence.tokens) + LONGEST_DRAFT <= self._cache.longest_row

    def draft(self, tokens: Mapping[Sequence, int], seconds: float) -> dict[Sequence, Seq[int]]:
        """Proposes so many tokens for each of these sequences, the most probable ones.

        Args:
            seconds: for so long, rows may compute the tokens that they are behind. Those that stay behind get no draft.
        """
        until = time.monotonic() + seconds
        opened = (self._opened(sequence) for sequence in tokens)
        ready = [row for row in opened if row is not None and (row.is_current or self._has_caught_up(row, until))]
        if drafting := [row for row in ready if not row.is_current]:
            self._run(drafting, [tokens[row.sequence] for row in drafting])
            self._faults = 0
        if self._cache.device.excess > 0:
            self._give_way()
        return {row.sequence: row.draft for row in ready}

    def _opened(self, sequence: Sequence) -> DraftRow | None:
        """The draft row of a sequence, with room for a draft and without wrong tokens. None if memory is short."""
        if (row := self._rows.get(sequence)) is None:
            row = self._new_row(sequence)
            if row is None or self._cache.open(row.room, row.salt, sequence.tokens, into=row) is None:
                return None
            self._rows[sequence] = row
        if row.is_current:
            return row
        if (right := row.right_tokens()) < row.computed:
            self._cache.truncate(row, right)
        row.draft = []
        if not self._cache.extend(row, row.room):
            self._close(sequence)
            return None
        return row

    def _new_row(self, sequence: Sequence) -> DraftRow | None:
        """The row of a sequence that has none, before it is opened. None if no draft can be made now."""
        return DraftRow(sequence=sequence)

    def _has_caught_up(self, row: DraftRow, until: float) -> bool:
        """Computes a chunk of the tokens that a draft row is behind, and registers its full blocks in the prefix cache.
        Returns whether its draft can be made."""
        left = until - time.monotonic()
        if row.behind > _TOGETHER and left > 0.0:
            self._cache.take_over(row, row.salt, row.sequence.tokens)
        if row.behind > _TOGETHER and left > 0.0:
            most = min(row.behind - 1, _LONGEST_CHUNK)
            tokens = self.cost.tokens_within(left, row.computed, min(_TOGETHER, most), most)
            span = Span(row, row.computed, tokens)
            self._pass([span], self._inputs([span]))
            mx.eval(self._cache.arrays())
            self._cache.freeze(row, row.salt, row.sequence.tokens)
            self._cache.release_windows(row)
        return row.behind <= _TOGETHER

    def _run(self, rows: Seq[DraftRow], counts: Seq[int]) -> None:
        """Makes the drafts of these rows: so many tokens of each. The first pass computes the tokens that the rows are
        behind, and each other one the tokens of the pass before. Each is built while the one before runs."""
        started = time.monotonic()
        wanted = dict(zip(rows, counts, strict=True))
        spans = in_order([Span(row, row.computed, row.behind) for row in rows])
        passes = [(spans, self._pass(spans, self._inputs(spans)))]
        for place in range(1, max(counts)):
            before, found = passes[-1]
            mx.async_eval(found.tokens)  # type: ignore[no-untyped-call]
            number = {span.row: number for number, span in enumerate(before)}
            spans = in_order([Span(row, row.computed, 1) for row in rows if wanted[row] > place])
            passes.append((spans, self._pass(spans, found.at([number[span.row] for span in spans]))))
            self._runner.wait()
        mx.eval(passes[-1][1].tokens)
        for row in rows:
            row.after = len(row.sequence.tokens)
        for spans, found in passes:
            for span, token in zip(spans, np.asarray(found.tokens), strict=True):
                span.row.draft.append(int(token))
        now = time.monotonic()
        self.cost.observe([Chunk(1, row.computed) for row in rows], len(rows), (now - started) / len(passes), now)

    def _pass(self, spans: Seq[Span[DraftRow]], inputs: DraftInputs) -> DraftInputs:
        """Builds one pass, and returns what the next one gets: the most probable token after each span, [spans]."""
        logits = self._runner.last_logits(spans, inputs.tokens)
        return DraftInputs(self._best(spans, logits))

    def _best(self, spans: Seq[Span[DraftRow]], logits: mx.array) -> mx.array:
        """The most probable tokens, lazy uint32 [spans], of a pass that counts as computed from now on."""
        for span in spans:
            span.row.computed = span.stop
        return logits[:, : self._vocab_size].argmax(axis=-1).astype(mx.uint32)

    def _inputs(self, spans: Seq[Span[DraftRow]]) -> DraftInputs:
        """The tokens of spans. One that the draft model does not have, because its vocabulary is padded less, is
        replaced by its last one, which costs nothing but a worse draft."""
        last = self._vocab_size - 1
        tokens = [token for span in spans for token in span.row.tokens_of(span)]
        return DraftInputs(mx.array([min(token, last) for token in tokens], mx.uint32))

    # -- faults and memory -----------------------------------------------------------------------

    def reset(self) -> None:
        """Drops all rows and arrays after a fault, and makes no drafts for a while."""
        self._rows.clear()
        self._runner.clear()
        self._rests = _REST << min(self._faults, _MOST_DOUBLINGS)
        self._faults += 1
        _log.warning("the draft model failed; it makes no drafts for the next %d units", self._rests)

    def _close(self, sequence: Sequence) -> None:
        self._cache.close(self._rows.pop(sequence))

    def _give_way(self) -> None:
        """Frees memory that others need: free blocks and cached prefixes, or else all rows."""
        self._give_back()
        if self._cache.device.excess > 0 and self._rows:
            for sequence in list(self._rows):
                self._close(sequence)
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
