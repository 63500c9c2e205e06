"""Rows whose reasoning is bounded, in a batch with rows that are free."""

from __future__ import annotations

import pytest
from harness import make_harness
from server.fakes import ByteTokenizer
from word_grammar import END, Words

from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.core.text import Reasoning
from mlx_parallm.grammar.wrappers import AfterReasoning, FreeText

PROMPT = [3, 1, 4, 1, 5]
MARK = list(b"</t>")
NO_END = SamplingParams(temperature=0.0, logit_bias=((END, -100.0), (256, -100.0), (257, -100.0)))


class Tokenizer(ByteTokenizer):
    reasoning = Reasoning("<t>", "</t>")
    eos_token_ids = frozenset({END})


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_end_mark_comes_after_the_budget_and_no_other_row_notices(lookahead: bool) -> None:
    harness = make_harness(eos_ids=(END,), lookahead=lookahead)
    for budget in (0, 1, 7):
        grammar = FreeText(Tokenizer(), started=True, budget=budget)
        harness.submit(str(budget), PROMPT, 20, grammar=grammar, sampling=NO_END)
    harness.submit("wide", PROMPT, 20, grammar=FreeText(Tokenizer(), started=True, budget=50), sampling=NO_END)
    harness.submit("free", PROMPT, 20, sampling=NO_END)
    harness.run()
    free = harness.tokens("free")
    assert harness.tokens("wide") == free
    for budget in (0, 1, 7):
        tokens = harness.tokens(str(budget))
        assert tokens[: budget + len(MARK)] == free[:budget] + MARK
        assert len(tokens) == 20


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    """Texts that end by themselves, also inside their reasoning."""
    harness = make_harness(eos_ids=(END,))
    bound = FreeText(Tokenizer(), started=True, budget=50)
    for seed in range(4):
        sampling = SamplingParams(seed=seed, logit_bias=((END, 3.0),))
        harness.submit(f"free {seed}", PROMPT, 40, sampling=sampling)
        harness.submit(f"bound {seed}", PROMPT, 40, sampling=sampling, grammar=bound)
    harness.run()
    free = [harness.tokens(f"free {seed}") for seed in range(4)]
    assert free == [harness.tokens(f"bound {seed}") for seed in range(4)]
    assert min(map(len, free)) < 40


def test_a_grammar_begins_after_the_forced_mark() -> None:
    harness = make_harness(eos_ids=(END,))
    grammar = AfterReasoning(Words((7, 8, 9)), Tokenizer(), started=True, budget=3)
    harness.answer("r", PROMPT, 20, grammar=grammar, sampling=NO_END)
    tokens = harness.tokens("r")
    assert tokens[3:] == [*MARK, 7, 8, 9]
