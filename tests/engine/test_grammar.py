"""Rows whose text follows a grammar, beside rows that are free."""

from __future__ import annotations

import pytest
from harness import TINY, Harness, assert_same_tokens, make_harness, solo
from tiny import tiny_model
from word_grammar import END, Words

from mlx_parallm.core.requests import (
    FinishReason,
    RequestFailed,
    SamplingParams,
)
from mlx_parallm.errors import GrammarError

PROMPT = [3, 1, 4, 1, 5]


def finish_of(harness: Harness, request: str, index: int = 0) -> FinishReason | None:
    return harness.outputs(request, index)[-1].finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rows_draw_what_their_grammar_allows_and_end_with_it(temperature: float) -> None:
    harness = make_harness(eos_ids=(END,))
    grammars = {str(i): Words((10 + i, 20 + i, 30 + i), (10 + i, 40 + i)) for i in range(6)}
    for rid, grammar in grammars.items():
        sampling = SamplingParams(temperature=temperature, seed=int(rid))
        harness.submit(rid, PROMPT, 12, grammar=grammar, sampling=sampling)
    harness.run()
    for rid, grammar in grammars.items():
        assert tuple(harness.tokens(rid)) in grammar.words
        assert finish_of(harness, rid) is FinishReason.STOP
    assert {len(harness.tokens(rid)) for rid in grammars} == {2, 3}


def test_a_text_that_may_go_on_ends_by_the_end_token() -> None:
    harness = make_harness(eos_ids=(END,))
    harness.answer("r", PROMPT, 12, grammar=Words((7,), (7, 8, 9)), sampling=SamplingParams(seed=3))
    assert tuple(harness.tokens("r")) in {(7, END), (7, 8, 9)}
    assert finish_of(harness, "r") is FinishReason.STOP


def test_each_of_n_texts_has_a_state_of_its_own() -> None:
    harness, grammar = make_harness(eos_ids=(END,)), Words((7, 8), (9, 10, 11))
    harness.answer("r", PROMPT, 12, n=8, grammar=grammar, sampling=SamplingParams(temperature=2.0, seed=1))
    assert grammar.started == 8
    texts = [tuple(harness.tokens("r", index)) for index in range(8)]
    assert set(texts) == {(7, 8), (9, 10, 11)}


def test_preempted_rows_go_on_where_their_text_was() -> None:
    harness = make_harness(budget_tokens=192, eos_ids=(END,))
    words = {f"r{i}": tuple(range(i, i + 60)) for i in range(5)}
    for rid, word in words.items():
        harness.submit(rid, PROMPT, 100, grammar=Words(word))
    harness.run()
    assert harness.loop.scheduler.preemptions > 0
    for rid, word in words.items():
        assert tuple(harness.tokens(rid)) == word


def test_a_grammar_that_gives_up_costs_its_own_request() -> None:
    harness = make_harness(eos_ids=(END,))
    harness.submit("bad", PROMPT, 12, n=2, grammar=Words((7, 8, 9), fails_after=1))
    harness.submit("good", PROMPT, 12, grammar=Words((7, 8, 9)))
    harness.submit("free", PROMPT, 12)
    harness.run()
    failed = harness.terminal("bad")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, GrammarError)
    assert harness.tokens("good") == [7, 8, 9]
    assert_same_tokens(harness.tokens("free"), solo(tiny_model("llama"), PROMPT, 12), TINY)
