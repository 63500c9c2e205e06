"""What a family's parser reads, and that it reads back whatever the family's grammar allows."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import runpy
from collections.abc import Iterator
from typing import Any

import jsonschema
import mlx_lm.tool_parsers
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import mistral
from server.fakes import VOCAB, ByteTokenizer
from tiny import tiny_tokenizer
from tool_families import ASKED, FAMILIES, TEXTS, TOOLS, tool
from walks import follows, walk

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.core.splitter import AnswerSyntax, split
from mlx_parallm.core.text import ToolCall, UnwritableToolError
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.model.tokenizer import Tokenizer, detokenizer_for
from mlx_parallm.model.tools import formats
from mlx_parallm.model.tools.formats import ToolFormat

MOST, CALLS = 3, 100
TRIP = tool(
    "trip",
    properties={
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "unit": {"enum": ["c", "f"]},
        "sure": {"type": "boolean"},
        "when": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"type": "null"}]},
        "size": {"type": "number", "minimum": -5, "maximum": 5},
        "most": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    },
    required=["city", "sure"],
)
NESTED = tool(
    "trip_all",
    properties={
        "who": {"$ref": "#/$defs/person"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    required=["who"],
    **{"$defs": {"person": {"type": "object", "properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"],
                            "additionalProperties": False}}},
)  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    made = LLCompiler(ByteTokenizer(), VOCAB)
    yield made
    made.close()


def of(family: ToolFormat, *tools: dict[str, Any], most: int = MOST, free: bool = False) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CALLS, family.grammar(tools, most, free))


def calls_in(family: ToolFormat, text: str, tools: tuple[dict[str, Any], ...]) -> list[ToolCall]:
    """Of a text that is calls and nothing else."""
    if family.end in ("}", "]"):  # marks that arguments may have too
        answer = split(text, AnswerSyntax(calls=family, tools=tools, max_calls=MOST + 1), cut=False)
        assert answer.text == ""
        return [ToolCall(call.name or "", call.arguments, call.call_id) for call in answer.calls]
    text = text.removeprefix(family.syntax.lead if family.syntax else "")
    assert text.startswith(family.starts[0])
    blocks = text.split(family.starts[0])[1:]
    if family.syntax is not None and family.syntax.between is not None:
        blocks = [text.removeprefix(family.starts[0])]
    found = []
    for block in blocks:
        block = block.rstrip("\n") if family.end else block
        assert block.endswith(family.end)
        found += family.parse(block.removesuffix(family.end), tools)
    return found


def pull(family: ToolFormat) -> list[str]:
    assert family.syntax is not None
    ends = [(family.syntax.argument or ("", ""))[1], (family.syntax.bare or ("", ""))[1]]
    return ['"', *filter(None, ends)]


def test_every_parser_of_mlx_lm_is_here() -> None:
    theirs = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert theirs <= FAMILIES.keys() | formats.OTHER_NAMES.keys()
    assert set(TEXTS) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_read(name: str) -> None:
    (call,) = calls_in(FAMILIES[name], TEXTS[name], TOOLS)
    assert (call.name, json.loads(call.arguments)) == ASKED


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_are_written_are_read_back(name: str) -> None:
    family = FAMILIES[name]
    assert family.syntax is not None
    asked = [ASKED, ("now", {})][: 1 if family.syntax.single else 2]
    text = family.written([{"name": name, "arguments": arguments} for name, arguments in asked])
    read = calls_in(family, text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in read] == asked


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("garbage", ["", "{", "no call at all", '{"name": 5}', "[]", '{"name": "x", "arguments": {}}'])
def test_what_is_no_call_of_a_tool_is_refused(name: str, garbage: str) -> None:
    with pytest.raises(ValueError, match="call"):
        FAMILIES[name].parse(garbage, TOOLS)


def json_call(arguments: str) -> tuple[ToolCall, ...]:
    return FAMILIES["json_tools"].parse('{"name": "get_weather", "arguments": ' + arguments + "}", TOOLS)


def test_half_a_surrogate_pair_is_no_text() -> None:
    (call,) = json_call('{"city": "\\ud800"}')
    assert call.arguments.encode() == b'{"city": "?"}'


@pytest.mark.parametrize("arguments", ['{"city": "x", "days": 1e999}', "[1]", "7", "null"])
def test_arguments_that_cannot_be_sent(arguments: str) -> None:
    with pytest.raises(ValueError, match=r"call|JSON"):
        json_call(arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_the_grammar_allows_is_read_back_and_valid(compiler: LLCompiler, name: str) -> None:
    family = FAMILIES[name]
    assert family.syntax is not None
    tools = (TRIP, *TOOLS[1:]) if family.syntax.scalars else (TRIP, NESTED, *TOOLS[1:])
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    grammar = compiler.compile(of(family, *tools))
    called, counts, read = set(), set(), 0
    for seed in range(CALLS):
        if read >= CALLS:
            break
        calls = calls_in(family, walk(grammar, seed, pull(family)), tools)
        read += len(calls)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        called |= {call.name for call in calls}
        counts.add(len(calls))
    assert called == set(schemas)
    assert read >= CALLS
    assert 1 in counts
    assert max(counts) in ([1] if family.syntax.single else range(2, MOST + 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_integer_of_a_call_stays_within_64_bits(compiler: LLCompiler, name: str) -> None:
    family = FAMILIES[name]
    grammar = compiler.compile(of(family, tool("f", properties={"n": {"type": "integer"}}, required=["n"]), most=1))
    call = next(text for seed in range(99) if (text := walk(grammar, seed, pull(family))))
    (read,) = calls_in(family, call, (tool("f", properties={"n": {"type": "integer"}}),))
    before, _, after = call.rpartition(str(json.loads(read.arguments)["n"]))
    assert before
    assert [follows(grammar, f"{before}{n}{after}") for n in (2**63 - 1, 2**63, -(2**63) - 1)] == [True, False, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_free_text_is_bound_inside_calls_alone(compiler: LLCompiler, name: str) -> None:
    family = FAMILIES[name]
    grammar = compiler.compile(of(family, *TOOLS, free=True))
    call = walk(compiler.compile(of(family, *TOOLS, most=1)), 1, pull(family))
    assert follows(grammar, "Just words, ünd so weiter\n")
    assert follows(grammar, f"I shall look.\n{call}")
    for start in family.starts:
        assert not follows(grammar, f"I shall look.\n{start}{{no call")


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^x"}}}, "pattern"),
        ("qwen3_coder", {"properties": {"a": {"enum": [" x"]}}}, "read back"),
        ("glm47", {"properties": {}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("glm47", {"properties": {}, "required": ["a"]}, "required"),
        ("gemma4", {"properties": {"a": {"type": "array"}}}, "lists or objects"),
        ("function_gemma", {"properties": {"a": {"type": "object"}}}, "lists or objects"),
        ("pythonic", {"properties": {"from": {"type": "string"}}}, "from"),
        ("pythonic", {"properties": {"a-b": {"type": "string"}}}, "a-b"),
        ("json_tools", {"type": "array"}, "object"),
    ],
)
def test_what_a_family_cannot_write_is_refused(name: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnwritableToolError, match=reason) as refused:
        FAMILIES[name].grammar([*TOOLS, tool("bad", **parameters)], 1, False)
    assert refused.value.index == len(TOOLS)


def special_tokenizer() -> Tokenizer:
    """Mistral's marks as special tokens, beside one that has no part in calls."""
    hf = tiny_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "[IMG]"]})
    parser = mistral.parse_tool_call
    hf.chat_template = "[TOOL_CALLS] [ARGS]"
    return Tokenizer(TokenizerWrapper(hf, tool_call_start="[TOOL_CALLS]", tool_call_end="", tool_parser=parser))


def test_marks_that_are_special_tokens_are_text_where_they_are_wanted() -> None:
    tokenizer = special_tokenizer()
    text = "ä[TOOL_CALLS]now[ARGS]{}[IMG]"
    ids = tokenizer.encode(text, add_special_tokens=False)

    def shown(visible_specials: frozenset[int]) -> str:
        detokenizer = detokenizer_for(tokenizer)((), visible_specials)
        return "".join(map(detokenizer.add, ids)) + detokenizer.finish()

    assert shown(frozenset()) == "änow{}"
    assert shown(tokenizer.tool_format.visible_specials) == "ä[TOOL_CALLS]now[ARGS]{}"
    assert len(tokenizer.tool_format.visible_specials) == 2


def test_the_grammar_takes_marks_as_special_tokens() -> None:
    tokenizer = special_tokenizer()
    compiler = LLCompiler(tokenizer, tokenizer.vocab_size)
    family = tokenizer.tool_format
    try:
        state = compiler.compile(
            GrammarSpec(GrammarKind.CALLS, family.grammar(TOOLS, 1, False), family.visible_specials)
        ).start()
        for token in tokenizer.encode("[TOOL_CALLS]now[ARGS]{}", add_special_tokens=False):
            state.accept(token)
        assert state.ended
    finally:
        compiler.close()


def test_a_parser_that_mlx_lm_has_not_costs_its_family_alone(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlx_lm.tool_parsers.muse_spark" else find(name)
    )
    assert runpy.run_path(formats.__file__)["FAMILIES"].keys() == FAMILIES.keys() - {"muse_spark"}
