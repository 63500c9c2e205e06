"""DraftHead proposes the next tokens of sequences with the base model's own prediction head (see `model.mtp`).

    base         t₀ … t₉₉           h₀ … h₉₉ are kept, t₁₀₀ is sampled
    draft row    (h₉₇, t₉₈)  (h₉₈, t₉₉)  (h₉₉, t₁₀₀) ─▶ d₁, h′ ─▶ (h′, d₁) ─▶ d₂, h″ ─▶ …

A draft row has keys and values of the head's layer. It begins where the hidden states do that are kept when the first
draft is made, so a head does not see what came before: only distances count between positions. What it has computed
from its own hidden states is truncated before the next draft, right or wrong, and computed again from the base's.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from mlx_parallm.batch.hidden import HiddenStates
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.draft_model import DraftInputs, DraftModel, DraftRow
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.model.mtp import HeadInput


class _HeadRow(DraftRow):
    def right_tokens(self) -> int:
        """How many tokens of the row are computed from hidden states of the base model."""
        return min(self.computed, self.after - self.start) if self.draft else self.computed


class DraftHead(DraftModel):
    """A draft model that is a head.

    Args:
        runner: of the head, with a KV pool for draft rows only, which keeps no prefixes.
        cost: as it was measured.
        vocab_size: width of the logits.
        inputs: takes the hidden states before the tokens of a pass.
        hidden: those of the base model.
    """

    expected = 0.75
    """Published shares of the first token of a draft are 0.7 to 0.9, for Qwen3.5 and DeepSeek V3."""

    def __init__(
        self, runner: BatchRunner, cost: CostModel, vocab_size: int, inputs: HeadInput, hidden: HiddenStates
    ) -> None:
        super().__init__(runner, cost, vocab_size, vocab_size)
        self._head_input = inputs
        self._hidden = hidden

    def begin_unit(self, live: Collection[Sequence]) -> None:
        self._hidden.forget(live)
        super().begin_unit(live)

    def _opened(self, sequence: Sequence) -> DraftRow | None:
        row = self._rows.get(sequence)
        if row is not None and not row.is_current:
            follows = row.start + row.right_tokens()
            if self._hidden.first(sequence, follows - 1, len(sequence.tokens) - 1) != follows - 1:
                self._close(sequence)  # states between are not kept
        return super()._opened(sequence)

    def _new_row(self, sequence: Sequence) -> DraftRow | None:
        first = self._hidden.first(sequence, 0, len(sequence.tokens) - 1)
        return _HeadRow(sequence=sequence, start=first + 1) if first < len(sequence.tokens) - 1 else None

    def _inputs(self, spans: Seq[Span[DraftRow]]) -> DraftInputs:
        wanted = [
            (each.row.sequence, each.row.start + each.start - 1, each.row.start + each.stop - 1) for each in spans
        ]
        return DraftInputs(super()._inputs(spans).tokens, self._hidden.gather(wanted))

    def _pass(self, spans: Seq[Span[DraftRow]], inputs: DraftInputs) -> DraftInputs:
        self._head_input.take(inputs.hidden)
        try:
            hidden, logits = self._runner.last_outputs(spans, inputs.tokens)
        finally:
            self._head_input.take(None)  # what is held cannot be overwritten in place
        return DraftInputs(self._best(spans, logits), hidden)

    @property
    def bytes_held(self) -> int:
        """Bytes of its KV pool and of the hidden states that are kept."""
        return super().bytes_held + self._hidden.nbytes
