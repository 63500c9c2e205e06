"""A grammar that begins where the reasoning ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.fakes import EOS, VOCAB, ByteTokenizer
from walks import allowed, follows

from mlx_parallm.core import Grammar, GrammarKind, GrammarSpec, Reasoning, ReasoningPrefix
from mlx_parallm.errors import GrammarError
from mlx_parallm.grammar.compiler import LLCompiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    tokenizer = ByteTokenizer()
    tokenizer.reasoning = Reasoning("<t>", "</t>")
    made = LLCompiler(tokenizer, VOCAB)
    yield made
    made.close()


def compiled(compiler: LLCompiler, reasoning_prefix: ReasoningPrefix) -> Grammar:
    return compiler.compile(GrammarSpec(GrammarKind.REGEX, "[0-9]{2}", reasoning_prefix=reasoning_prefix))


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
    state.accept(ord("<"))
    assert allowed(state) == {ord("t")}


def test_texts_are_strangers(compiler: LLCompiler) -> None:
    grammar = compiled(compiler, ReasoningPrefix.OPTIONAL)
    one, other = grammar.start(), grammar.start()
    one.accept(ord("<"))
    assert ord("4") in allowed(other)


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
