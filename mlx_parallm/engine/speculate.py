"""Speculation: drafts of the next tokens of a sequence, so that one forward pass gives several tokens of it.

    propose ─▶ the scheduler takes as many tokens as pay ─▶ one pass samples a token after each ─▶ compare

    in the pass     The   cat   sat   on        "cat sat on" is the draft
    sampled after   cat   sat   in    ·         3 tokens: the last one shows that "on" was wrong

Each position samples with its own place in the sequence's random stream, exactly as without a draft, and its token is
kept as long as all tokens of the draft before it were right. So the same seed gives the same text; a wrong draft costs
only time.

A sequence whose draft has k tokens, each right with probability a, advances by 1 + a + a² + … + a^k tokens on average.
Each token of a draft makes the unit longer for all its sequences, by `CostModel.growth`. Some drafts cost nothing; a
draft model takes a pass for each token, for all sequences together.

Tokens of all sequences together are not all that counts: a batch ends with its slowest sequence, which may be one
without drafts that only waited for those of others. So each sequence has an account, `Sequence.ahead`, and a unit gets
no drafts that would leave one of them far behind.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlx_parallm.core.grammar import GrammarState
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.faults import Affecting
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.errors import GrammarError
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.layer_state import KVLayout

if TYPE_CHECKING:
    from mlx_parallm.engine.draft_model import DraftModel
    from mlx_parallm.engine.scheduler import RLAwareScheduler

# ---- where drafts come from --------------------------------------------------------------------

LONGEST_DRAFT = 7
"""Tokens of a draft at most. With the token before them they are 8, the most that the attention of Metal takes in one
call without another kernel."""

_NEWEST, _NEWEST_OF_ALL = 0.2, 0.02
"""Weights of the newest token in the share of right ones: of one sequence, and of all sequences."""

_UNUSED, _UNUSED_OF_ALL = 1 / 128, 1 / 4096
"""How far the shares of the draft model return to what is expected with each draft that is not asked of it. So it is
tried again in the end, because only a draft that was made can show whether it is right."""


class Source(Enum):
    """What a draft is made from: the tokens that a grammar demands, what followed earlier in the sequence's own text,
    or a draft model."""

    GRAMMAR = "grammar"
    TEXT = "text"
    MODEL = "model"


EXPECTED = {Source.GRAMMAR: 0.7, Source.TEXT: 0.3, Source.MODEL: 0.6}
"""Expected shares of right tokens before the first draft."""


class PromptLookup:
    """Proposes what followed the last tokens of a sequence earlier in its own text: after the newest earlier occurrence
    of the last three of them, or else of the last two.

    It costs no forward pass, and is often right where an answer repeats its prompt: in edits, summaries, quotes and
    code. Saxena, "Prompt Lookup Decoding", 2023. It compares the whole text with its end, in about 10 microseconds for
    each 10,000 tokens.

    Args:
        tokens: the sequence's own list, which grows at its end.
    """

    __slots__ = ("_searched", "_tokens")

    def __init__(self, tokens: Seq[int]) -> None:
        self._tokens = tokens
        self._searched = array("i", tokens)  # the same tokens, for NumPy

    def propose(self, most: int) -> Seq[int]:
        """Up to `most` tokens that may come next; none if the last two tokens are new. Beyond the end of the text they
        repeat what is proposed already."""
        self._searched.extend(self._tokens[len(self._searched) :])
        tokens = np.frombuffer(self._searched, np.intc)
        if len(tokens) < 3:
            return ()
        ends = np.flatnonzero(tokens[1:-1] == tokens[-1]) + 1
        ends = ends[tokens[ends - 1] == tokens[-2]]
        if not len(ends):
            return ()
        of_three = ends[(ends > 1) & (tokens[ends - 2] == tokens[-3])]
        start = int((of_three if len(of_three) else ends)[-1]) + 1
        draft = list(self._tokens[start : start + most])
        while len(draft) < most:
            draft += draft[: most - len(draft)]
        return draft


class Drafter:
    """Proposes drafts of one sequence, and knows how often those of each source were right lately.

    A draft that is not computed is compared as well, with the token that is sampled anyway. So the share of right ones
    is known before a draft costs anything. Only a draft model has to be asked.

    Attributes:
        source: of the last draft.
        acceptance: the share of right tokens of each source lately.

    Args:
        tokens: the sequence's own list, which grows at its end.
        sources: those that are used.
        of_all: the share of right tokens of each source lately, over all sequences. A new one begins with it.
    """

    __slots__ = ("_lookup", "_of_all", "acceptance", "source")

    def __init__(self, tokens: Seq[int], sources: frozenset[Source], of_all: dict[Source, float]) -> None:
        self.source = Source.TEXT
        self._lookup = PromptLookup(tokens) if Source.TEXT in sources else None
        self._of_all = of_all
        self.acceptance = dict(of_all)

    def propose(self, grammar: GrammarState | None) -> Seq[int]:
        """The tokens that may come next, all of which the grammar allows; none if there is no draft."""
        if self.source is not Source.MODEL:
            self.acceptance[Source.MODEL] += _UNUSED * (self._of_all[Source.MODEL] - self.acceptance[Source.MODEL])
        forced = () if grammar is None else grammar.forced()[:LONGEST_DRAFT]
        self.source = Source.GRAMMAR if forced else Source.TEXT
        draft = forced or (() if self._lookup is None else self._lookup.propose(LONGEST_DRAFT))
        return _allowed(grammar, draft)

    def take_from_model(self, proposed: Seq[int], grammar: GrammarState | None) -> Seq[int]:
        """The draft that the draft model has made, as far as the grammar allows it."""
        self.source = Source.MODEL
        draft = _allowed(grammar, proposed)
        if not draft:
            self.add(False)  # its first token is one that cannot be sampled
        return draft

    def add(self, right: bool) -> bool:
        """Remembers whether a token of the last draft was right, and returns it."""
        self.acceptance[self.source] += _NEWEST * (right - self.acceptance[self.source])
        self._of_all[self.source] += _NEWEST_OF_ALL * (right - self._of_all[self.source])
        return right


def _allowed(grammar: GrammarState | None, draft: Seq[int]) -> Seq[int]:
    """The beginning of a draft that the grammar allows."""
    if grammar is None:
        return draft
    state = grammar.copy()
    for accepted, token in enumerate(draft):
        try:
            state.accept(token)
        except GrammarError:
            return draft[:accepted]
    return draft


# ---- the sequences of one base model -----------------------------------------------------------


class Speculator:
    """Proposes drafts for the sequences of one base model.

    Args:
        sources: where drafts come from besides grammars.
        model: None if no draft model is used.
        layout: of the base model. If blocks are quantized as they are left, a draft ends where its block does, because
            a block that a wrong draft has left could not be written again. With recurrent layers it ends before that,
            because the state at the end of a block is kept for the prefix cache, and must be right.
    """

    def __init__(self, sources: frozenset[Source], model: DraftModel | None, layout: KVLayout) -> None:
        self._sources = sources
        self._model = model
        self._last = None if layout.rolls_back and layout.bits is None else BLOCK_TOKENS - 1 - (not layout.rolls_back)
        self._expected_of_model = EXPECTED[Source.MODEL] if model is None else model.expected
        self._acceptance = EXPECTED | {Source.MODEL: self._expected_of_model}

    def propose(self, live: Collection[Sequence]) -> None:
        """Sets what is `proposed` for each sequence that decodes, as far as it costs no pass: the tokens that may
        follow those which have been read."""
        if self._model is not None:
            with Affecting(work=self._model):
                self._model.begin_unit(live)
        decoding = []
        for sequence in live:
            sequence.proposed, sequence.model_acceptance = (), 0.0
            may_draft = sequence.max_tokens - sequence.sampled > 1 and not sequence.samples_alone
            if may_draft and sequence.status is SequenceStatus.RUNNING:
                decoding.append(sequence)
        if len(decoding) < MOST_TOKENS:
            for sequence in decoding:
                with Affecting([sequence.request]):
                    self._propose(sequence)

    def _propose(self, sequence: Sequence) -> None:
        of_all = self._acceptance
        drafter = sequence.drafter = sequence.drafter or Drafter(sequence.tokens, self._sources, of_all)
        if drafter.source is not Source.MODEL:
            of_all[Source.MODEL] += _UNUSED_OF_ALL * (self._expected_of_model - of_all[Source.MODEL])
        self._set(sequence, drafter, drafter.propose(sequence.sampling.grammar))
        forced = sequence.proposed and drafter.source is Source.GRAMMAR
        if self._model is not None and not forced and self._model.may_draft(sequence):
            sequence.model_acceptance = drafter.acceptance[Source.MODEL]

    def _set(self, sequence: Sequence, drafter: Drafter, draft: Seq[int]) -> None:
        most = len(draft) if self._last is None else max(self._last - sequence.computed % BLOCK_TOKENS, 0)
        sequence.proposed, sequence.acceptance = draft[:most], drafter.acceptance[drafter.source]

    def worth_waiting(self, scheduler: RLAwareScheduler) -> bool:
        """Whether the unit in flight should be read before the next one is chosen, so that the next one has drafts."""
        rows = scheduler.decode_rows
        gain = _best_drafts(rows, rows, scheduler.cost).gain
        if self._model is not None:
            gain = max(gain, _best_drafts(rows, rows, scheduler.cost, self._model.cost).gain)
        return gain >= _GAIN_WORTH_WAITING

    def run_draft_model(self, scheduler: RLAwareScheduler) -> float:
        """Runs the draft model for the sequences for which that pays. All others wait for it. Returns for how long."""
        if self._model is None:
            return 0.0
        tokens = tokens_to_draft(scheduler.decode_rows, scheduler.cost, self._model.cost)
        if not tokens:
            return 0.0
        started = time.monotonic()
        with Affecting(work=self._model):
            drafts = self._model.draft(tokens, min(scheduler.gap.chunk_s, scheduler.gap.remaining_s))
        for sequence, draft in drafts.items():
            with Affecting([sequence.request]):
                assert sequence.drafter is not None
                allowed = sequence.drafter.take_from_model(draft, sequence.sampling.grammar)
                self._set(sequence, sequence.drafter, allowed)
        rows = scheduler.decode_rows
        predicted_s = sum(
            self._model.cost.step_seconds(sum(each >= place for each in tokens.values()))
            for place in range(1, LONGEST_DRAFT + 1)
        )
        for row in rows:
            row.ahead -= predicted_s / scheduler.cost.step_seconds(len(rows))
        seconds = time.monotonic() - started
        scheduler.gap.add_wait_time(seconds)
        return seconds


# ---- how many tokens of drafts pay -------------------------------------------------------------

MOST_TOKENS = 32
"""Tokens of all decode rows and their drafts together. An Apple GPU multiplies 32 of them by a matrix in about the time
of one, and 33 in twice that time (ml-explore/mlx#3863)."""

_LEAST_GAIN = 1.1
"""Least predicted gain of a unit with drafts over the same unit without, in tokens per second of all sequences."""

_MOST_BEHIND = 4.0
"""How many steps a sequence may be behind, times the square of what a unit gains for all sequences, less 1. In the
replays of `tests/scheduler/test_drafts_pay.py`, batches of 8 and 16 texts that repeat little are 0.997 and 1.0 times as
fast as without drafts, and 0.986 and 0.979 times if there is no limit. Batches of copies, some of which begin later,
are 1.9 and 1.06 times as fast; without a limit 2.05 and 1.39 times, and 1.21 and 1.08 times if none may be behind."""

_GAIN_WORTH_WAITING = 1.25
"""Least predicted gain for which the device idles until the tokens of the unit in flight are read."""


class _Token(NamedTuple):
    """One token of a draft: the probability that it and those before it are right, its sequence, its place in the
    draft, from 1, and whether the draft model has yet to make it."""

    probability: float
    sequence: Sequence
    place: int
    by_model: bool


class _Drafts(NamedTuple):
    """The drafts of a unit: how many tokens of each sequence that has one, and how much faster tokens come."""

    tokens: Mapping[Sequence, int]
    gain: float


def choose_drafts(rows: Seq[Sequence], cost: CostModel) -> None:
    """Sets `drafted` of these decode rows. A draft begins after a token that has been read."""
    drafts = _best_drafts(rows, [row for row in rows if not row.unread], cost)
    for row in rows:
        row.drafted = drafts.tokens.get(row, 0) if drafts.gain >= _LEAST_GAIN else 0


def tokens_to_draft(rows: Seq[Sequence], cost: CostModel, model: CostModel) -> Mapping[Sequence, int]:
    """How many tokens the draft model should make for each of these decode rows. None where other drafts are better,
    and none at all where its passes take longer than they gain."""
    drafts = _best_drafts(rows, rows, cost, model)
    if drafts.gain < _LEAST_GAIN or drafts.gain <= _best_drafts(rows, rows, cost).gain:
        return {}
    return {row: tokens for row, tokens in drafts.tokens.items() if _prefers_model(row)}


def _best_drafts(
    rows: Seq[Sequence], drafting: Iterable[Sequence], cost: CostModel, model: CostModel | None = None
) -> _Drafts:
    """The most probable tokens of drafts for a unit of these decode rows, as many as let tokens come fastest and leave
    no row behind.

    Args:
        drafting: those that may have a draft.
        model: predicts the passes of the draft model, which makes drafts where it is right more often than what is
            proposed already. None: it is not used.
    """
    tokens = (token for row in drafting for token in _tokens(row, model is not None and _prefers_model(row)))
    in_turn = sorted(tokens, key=lambda token: (-token.probability, token.sequence.ahead))
    least = len(rows) + sum(row.to_redo for row in rows)
    advance, drafting_s, best, best_gain = float(len(rows)), 0.0, 0, 1.0
    ahead = {row: row.ahead for row in rows}  # as it would be if the unit took no longer
    in_pass: Counter[int] = Counter()  # rows in each pass of the draft model
    for taken, token in enumerate(in_turn[: max(MOST_TOKENS - least, 0)], 1):
        advance += token.probability
        ahead[token.sequence] += token.probability
        if token.by_model and model is not None:
            before, in_pass[token.place] = in_pass[token.place], in_pass[token.place] + 1
            drafting_s += model.step_seconds(before + 1) - model.step_seconds(before)
        delay = cost.growth(len(rows), least + taken) / cost.growth(len(rows), least) - 1.0
        delay = (2 if cost.again else 1) * delay + drafting_s / cost.step_seconds(len(rows))
        gain = advance / len(rows) / (1.0 + delay)
        if gain > best_gain and delay - min(ahead.values()) <= _MOST_BEHIND * (gain - 1.0) ** 2:
            best, best_gain = taken, gain
    return _Drafts(Counter(token.sequence for token in in_turn[:best]), best_gain)


def _tokens(row: Sequence, by_model: bool) -> Iterator[_Token]:
    """The tokens that are proposed for a row, or those that the draft model would make. None is sampled after
    `max_tokens`."""
    proposed = LONGEST_DRAFT if by_model else len(row.proposed)
    longest = min(proposed, LONGEST_DRAFT - row.to_redo, row.max_tokens - row.sampled - 1)
    acceptance = row.model_acceptance if by_model else row.acceptance
    return (_Token(acceptance**place, row, place, by_model) for place in range(1, longest + 1))


def _prefers_model(row: Sequence) -> bool:
    return row.model_acceptance > (row.acceptance if row.proposed else 0.0)
