"""A grammar that begins where the reasoning ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.fakes import EOS, VOCAB, ByteTokenizer
from walks import allowed, follows

from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec, ReasoningPrefix
from mlx_parallm.core.text import Reasoning
from mlx_parallm.errors import GrammarError
from mlx_parallm.grammar.compiler import LLCompiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    tokenizer = ByteTokenizer()
    tokenizer.reasoning = Reasoning("<t>", "</t>")
    made = LLCompiler(tokenizer, VOCAB)
    yield made
    made.close()


def compiled(compiler: LLCompiler, reasoning_prefix: ReasoningPrefix, budget: int | None = None) -> Grammar:
    return compiler.compile(
        GrammarSpec(GrammarKind.REGEX, "[0-9]{2}", reasoning_prefix=reasoning_prefix, reasoning_budget=budget)
    )


def free(compiler: LLCompiler, reasoning_prefix: ReasoningPrefix, budget: int) -> Grammar:
    """Any text behind so many tokens of reasoning."""
    return compiler.compile(
        GrammarSpec(GrammarKind.TEXT, "", reasoning_prefix=reasoning_prefix, reasoning_budget=budget)
    )


@pytest.mark.parametrize(
    ("reasoning_prefix", "good", "bad"),
    [
        (ReasoningPrefix.NONE, ["42"], ["<t></t>42", "x</t>42"]),
        (ReasoningPrefix.OPTIONAL, ["42", "<t>Hm </t </t>42", "<t></t>42"], ["x</t>42", "<x", "<t>42", "4</t>42"]),
        (ReasoningPrefix.OPEN, ["</t>42", "Hm, 42? </t>42", "<t></t>42"], ["42", "</t>x", "</t>4"]),
    ],
)
def test_what_may_come_before(
    compiler: LLCompiler, reasoning_prefix: ReasoningPrefix, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(compiler, reasoning_prefix)
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


def test_nothing_ends_a_text_while_it_thinks(compiler: LLCompiler) -> None:
    state = compiled(compiler, ReasoningPrefix.OPEN).start()
    for token in b"Hm":
        assert set(range(256)) <= allowed(state)
        assert EOS not in allowed(state)
        assert not state.ended
        state.accept(token)


def test_a_start_mark_that_was_begun_is_gone_on_with(compiler: LLCompiler) -> None:
    state = compiled(compiler, ReasoningPrefix.OPTIONAL).start()
    assert allowed(state) == {ord("<"), *b"0123456789"}
    assert list(state.forced()) == [], "it may think or answer"
    state.accept(ord("<"))
    assert allowed(state) == {ord("t")}


class WideTokenizer(ByteTokenizer):
    """Token 256 ends the reasoning and begins the answer at once."""

    reasoning = Reasoning("<t>", "</t>")

    def token_bytes(self, token_id: int) -> bytes:
        return b"</t> 4" if token_id == 256 else super().token_bytes(token_id)


def test_what_a_token_says_after_the_end_mark_is_the_grammars() -> None:
    compiler = LLCompiler(WideTokenizer(), VOCAB)
    try:
        state = compiled(compiler, ReasoningPrefix.OPEN).start()
        state.accept(256)
        assert allowed(state) == set(b"0123456789")
        state.accept(ord("2"))
        assert state.ended
        letters = compiler.compile(
            GrammarSpec(GrammarKind.REGEX, "[a-z]", reasoning_prefix=ReasoningPrefix.OPEN)
        ).start()
        with pytest.raises(GrammarError):
            letters.accept(256)
    finally:
        compiler.close()


def test_reasoning_is_not_forced_and_a_copy_thinks_alone(compiler: LLCompiler) -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes"]', reasoning_prefix=ReasoningPrefix.OPTIONAL)
    state = compiler.compile(spec).start()
    copied = state.copy()
    for token in b"<t>Hm</t>":
        assert not copied.forced()
        copied.accept(token)
    assert bytes(copied.forced()) == b"yes"
    assert allowed(state) == {*b"<y"}


# ---- budgets -------------------------------------------------------------------------------------------

OPTIONAL, OPEN = ReasoningPrefix.OPTIONAL, ReasoningPrefix.OPEN
EVERYTHING = set(range(VOCAB))


@pytest.mark.parametrize(
    ("reasoning_prefix", "good", "bad"),
    [
        (OPTIONAL, ["42", "<t>abcd</t>42", "<t>a</t>42", "<t></t>42"], ["<t>abcde</t>42", "<t>abcd</t>4"]),
        (OPEN, ["abcd</t>42", "</t>42", "ab</t>42"], ["abcde</t>42", "abcd42", "ab</</t>42"]),
    ],
)
def test_a_grammar_begins_behind_so_many_tokens(
    compiler: LLCompiler, reasoning_prefix: ReasoningPrefix, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(compiler, reasoning_prefix, budget=4)
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


@pytest.mark.parametrize("begun", [b"", b"<t>", b" \n<t>"])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_after_its_budget_only_the_end_mark_may_come_and_then_anything(
    compiler: LLCompiler, begun: bytes, budget: int
) -> None:
    state = free(compiler, OPTIONAL if begun else OPEN, budget).start()
    for token in begun:
        assert allowed(state) == EVERYTHING
        state.accept(token)
    for token in b"Hmm"[:budget]:
        assert allowed(state) == EVERYTHING
        assert not state.forced()
        state.accept(token)
    assert bytes(state.forced()) == b"</t>"
    for token in b"</t>":
        assert allowed(state) == {token}
        state.accept(token)
    for token in b"<t>No more reasoning.":
        assert allowed(state) == EVERYTHING
        assert not state.forced()
        state.accept(token)
    assert not state.ended


def test_reasoning_that_ends_within_its_budget_is_not_touched(compiler: LLCompiler) -> None:
    state = free(compiler, OPEN, budget=10).start()
    for token in b"Hm</t>":
        assert allowed(state) == EVERYTHING
        state.accept(token)
    for token in b" A long answer without any mark":
        assert allowed(state) == EVERYTHING
        state.accept(token)


@pytest.mark.parametrize("text", [b"<table> <t>and so on", b"Hello <t>", b"<"])
def test_a_text_that_does_not_begin_with_the_mark_is_free(compiler: LLCompiler, text: bytes) -> None:
    state = free(compiler, OPTIONAL, budget=0).start()
    for token in text:
        assert allowed(state) == EVERYTHING
        state.accept(token)
    assert allowed(state) == EVERYTHING


def test_a_copy_has_a_budget_of_its_own(compiler: LLCompiler) -> None:
    for grammar in (free(compiler, OPEN, budget=2), compiled(compiler, OPEN, budget=2)):
        state = grammar.start()
        copied = state.copy()
        for token in b"ab":
            copied.accept(token)
        assert bytes(copied.forced()) == b"</t>"
        assert not state.forced()
        assert len(allowed(state)) > 100


class AgainTokenizer(ByteTokenizer):
    """Reasoning may come again, after text."""

    reasoning = Reasoning("<t>", "</t>", repeats=True)


def test_reasoning_that_comes_again_has_what_is_left_of_the_budget() -> None:
    compiler = LLCompiler(AgainTokenizer(), VOCAB)
    try:
        state = free(compiler, OPTIONAL, budget=8).start()
        for token in b"I look. <t>ab</t> It rains. <t>xyz":  # a mark of several tokens counts, except for its last one
            assert allowed(state) == EVERYTHING
            assert not state.free
            state.accept(token)
        for token in b"</t>":
            assert allowed(state) == {token}
            state.accept(token)
        for token in b" And again: <t>":
            assert allowed(state) == EVERYTHING
            state.accept(token)
        assert allowed(state) == {ord("<")}
    finally:
        compiler.close()
