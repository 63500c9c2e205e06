"""Calls that a grammar enforces, read in pieces: joined, they are the calls that the family's parser reads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from model.test_tool_families import NESTED, TRIP, calls_in, pull
from server.fakes import VOCAB, ByteTokenizer
from tool_families import FAMILIES, TOOLS
from walks import walk

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.core.splitter import AnswerPart, AnswerSyntax, CallPart, Splitter, join_parts
from mlx_parallm.core.text import Tool
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.model.tools.formats import ToolFormat

MOST = 3


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    made = LLCompiler(ByteTokenizer(), VOCAB)
    yield made
    made.close()


def syntax_of(family: ToolFormat, tools: tuple[Tool, ...], most: int = MOST) -> AnswerSyntax:
    return AnswerSyntax(calls=family, tools=tools, max_calls=most, enforced=True)


def split_in_pieces(text: str, syntax: AnswerSyntax, rng: random.Random, cut: bool = False) -> list[AnswerPart]:
    """The parts of `text`, which arrives in pieces of random length."""
    splitter, parts = Splitter(syntax), []
    while text:
        length = rng.randint(1, 9)
        parts += splitter.feed(text[:length])
        text = text[length:]
    return [*parts, *splitter.end(cut)]


def said(calls: tuple[CallPart, ...]) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pieces_of_calls_are_the_calls(compiler: LLCompiler, name: str) -> None:
    family = FAMILIES[name]
    assert family.syntax is not None
    tools = (TRIP, *TOOLS[1:]) if family.syntax.scalars else (TRIP, NESTED, *TOOLS[1:])
    syntax, rng = syntax_of(family, tools), random.Random(name)
    grammar = compiler.compile(GrammarSpec(GrammarKind.CALLS, family.grammar(tools, MOST, False)))
    for seed in range(12):
        text = walk(grammar, seed, pull(family) if family.syntax.bare else '"')  # parsers end a quoted text at a mark
        joined = join_parts(split_in_pieces(text, syntax, rng))
        expected = [(call.name, json.loads(call.arguments)) for call in calls_in(family, text, tools)]
        assert [(call.name, json.loads(call.arguments)) for call in joined.calls] == expected, text
        assert joined.text == ""
        assert all(call.complete for call in joined.calls)
        for _ in range(3):
            assert said(join_parts(split_in_pieces(text, syntax, rng)).calls) == said(joined.calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_off_anywhere_has_what_was_certain(compiler: LLCompiler, name: str) -> None:
    family, rng = FAMILIES[name], random.Random(name)
    syntax = syntax_of(family, TOOLS)
    grammar = compiler.compile(GrammarSpec(GrammarKind.CALLS, family.grammar(TOOLS, 1, False)))
    text = next(text for seed in range(99) if "days" in (text := walk(grammar, seed, pull(family))))
    (whole,) = join_parts(split_in_pieces(text, syntax, rng)).calls
    lengths = []
    for end in range(len(family.starts[0]), len(text)):
        joined = join_parts(split_in_pieces(text[:end], syntax, rng, cut=True))
        assert joined.text == ""
        for call in joined.calls:
            assert call.name == whole.name
            assert whole.arguments.startswith(call.arguments)
            assert call.complete == (call.arguments == whole.arguments)
        lengths.append(sum(len(call.arguments) for call in joined.calls))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_text_goes_on_after_the_calls(compiler: LLCompiler, name: str) -> None:
    """Calls that may come among text are enforced from their start mark on."""
    family, rng = FAMILIES[name], random.Random(name)
    call = walk(compiler.compile(GrammarSpec(GrammarKind.CALLS, family.grammar(TOOLS, 1, False))), 1, pull(family))
    joined = join_parts(split_in_pieces(f"I look.\n{call}\nThat is all.", syntax_of(family, TOOLS), rng))
    assert joined.text == "I look.That is all."
    assert [call.complete for call in joined.calls] == [True]


def test_a_long_text_is_not_held_back() -> None:
    """The name comes with the last character before the arguments, and then each part of the text at once."""
    family = FAMILIES["qwen3_coder"]
    splitter = Splitter(syntax_of(family, TOOLS))
    shown = []
    for text in ("<tool_call>\n<function=get_weather", ">\n", "<parameter=city>\n", 'São "Pa', "ulo\n</para", "graph>"):
        calls = [part.call for part in splitter.feed(text) if part.call]
        shown.append(("".join(call.name or "" for call in calls), "".join(call.arguments for call in calls)))
    assert shown == [
        ("", ""),
        ("get_weather", ""),
        ("", '{"city": "'),
        ("", 'São \\"Pa'),
        ("", "ulo"),
        ("", "\\n</paragraph>"),
    ]


def test_calls_beyond_the_limit_are_dropped() -> None:
    family = FAMILIES["kimi_k2"]
    call = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = family.starts[0] + call.format(0) + call.format(1) + family.end
    joined = join_parts(split_in_pieces(text, syntax_of(family, TOOLS, most=1), random.Random(0)))
    assert [call.call_id for call in joined.calls] == ["functions.now:0"]
    assert joined.text == ""
