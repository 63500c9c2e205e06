"""Rows whose text follows a grammar, beside rows that are free."""

from __future__ import annotations

import random
import re

import pytest
from harness import Harness, Solo, assert_same_tokens, make_harness, solo
from tiny import tiny_model
from word_grammar import END, Words

from mlx_parallm.core.requests import (
    FinishReason,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.errors import GrammarError

TINY = 1e-5
PROMPT = [3, 1, 4, 1, 5]


def finish_of(harness: Harness, request: str, index: int = 0) -> FinishReason | None:
    outputs = [e for e in harness.of(request) if isinstance(e, SequenceOutput) and e.index == index]
    return outputs[-1].finish_reason


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


def test_max_tokens_cuts_a_text_short() -> None:
    harness = make_harness(eos_ids=(END,))
    harness.answer("r", PROMPT, 2, grammar=Words((7, 8, 9)))
    assert harness.tokens("r") == [7, 8]
    assert finish_of(harness, "r") is FinishReason.LENGTH


def test_each_of_n_texts_has_a_state_of_its_own() -> None:
    harness, grammar = make_harness(eos_ids=(END,)), Words((7, 8), (9, 10, 11))
    harness.answer("r", PROMPT, 12, n=8, grammar=grammar, sampling=SamplingParams(temperature=2.0, seed=1))
    assert grammar.started == 8
    texts = [tuple(harness.tokens("r", index)) for index in range(8)]
    assert set(texts) == {(7, 8), (9, 10, 11)}


def test_free_rows_draw_what_they_draw_alone() -> None:
    """Whatever joins and leaves beside them: with grammars steps are not sampled ahead."""
    model, rng = tiny_model("llama"), random.Random(0)
    harness = make_harness(model, eos_ids=(END,), max_rows=6)
    rows = {f"free{i}": [rng.randrange(250) for _ in range(rng.randint(2, 30))] for i in range(5)}
    wanted = {rid: solo(tiny_model("llama"), row, 20) for rid, row in rows.items()}
    for number, (rid, row) in enumerate(rows.items()):
        harness.submit(rid, row, 20)
        harness.submit(f"bound{number}", PROMPT, 9, grammar=Words(tuple(range(number, number + 5))))
        harness.step(rng.randint(0, 6))
    harness.run()
    for rid, reference in wanted.items():
        got = harness.tokens(rid)
        assert len(got) == 20 or got[-1] == END
        assert_same_tokens(got, Solo(reference.tokens[: len(got)], reference.gaps[: len(got)]), TINY)
    for number in range(5):
        assert harness.tokens(f"bound{number}") == list(range(number, number + 5))


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


@pytest.mark.parametrize("method", ["begin", "sample", "read"])
def test_a_failed_step_is_recovered_from(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Rows that were not in it go on; their grammars have accepted what was read, and nothing twice."""
    harness = make_harness(eos_ids=(END,), max_rows=2)
    harness.submit("first", PROMPT, 20, grammar=Words(tuple(range(15))))
    harness.submit("second", PROMPT, 20, grammar=Words(tuple(range(50, 65))))
    harness.submit("later", PROMPT, 20, grammar=Words(tuple(range(100, 115))))
    harness.until(lambda: len(harness.tokens("first")) >= 5)
    inner = getattr(harness.runner, method)

    def once(*args: object) -> object:
        monkeypatch.setattr(harness.runner, method, inner)
        raise RuntimeError("injected")

    monkeypatch.setattr(harness.runner, method, once)
    harness.run()
    assert isinstance(harness.terminal("first"), RequestFailed)
    assert isinstance(harness.terminal("later"), RequestFinished)
    assert harness.tokens("later") == list(range(100, 115))
    assert re.fullmatch(r"\d+", str(harness.loop.counters.failed_steps))


def test_stop_strings_end_a_bound_text_too() -> None:
    harness = make_harness(eos_ids=(END,))
    harness.answer("r", PROMPT, 20, grammar=Words((65, 66, 67, 68)), stopping=StopParams(20, stop=("<66>",)))
    assert len(harness.tokens("r")) <= 3
    assert finish_of(harness, "r") is FinishReason.STOP
