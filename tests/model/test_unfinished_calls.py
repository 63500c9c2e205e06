"""What a family reads in a call that was cut off."""

from __future__ import annotations

import json

import pytest
from tool_families import ASKED, FAMILIES, TEXTS, TOOLS

MANY = sorted(name for name, family in FAMILIES.items() if family.syntax and family.syntax.between is not None)
"""Families that write several calls between one pair of marks."""


def body(name: str) -> str:
    family = FAMILIES[name]
    return TEXTS[name].removeprefix(family.starts[0]).removesuffix(family.end)


@pytest.mark.parametrize("name", FAMILIES)
def test_wherever_a_call_is_cut_there_is_its_name_and_the_beginning_of_its_arguments(name: str) -> None:
    text, whole, told = body(name), json.dumps(ASKED[1], ensure_ascii=False), []
    for end in range(len(text) + 1):
        calls = FAMILIES[name].unfinished(text[:end], TOOLS)
        assert len(calls) <= 1, text[:end]
        for call in calls:
            assert call.name == ASKED[0]
            assert whole.startswith(call.arguments), text[:end]
            assert call.complete <= (call.arguments == whole)
        told += [call.arguments for call in calls]
    assert told == sorted(told, key=len), "nothing that was read is taken back"
    assert '"São Paulo"' in told[-1]
    assert len(text) - len(told) < text.index(ASKED[0]) + len(ASKED[0]) + 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "text", ["x is a mark", "{ and so on", "nobody(", "get weather", '{"name": "nobody", "argu', "]"]
)
def test_what_begins_no_call_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match="call"):
        FAMILIES[name].unfinished(text, TOOLS)


@pytest.mark.parametrize("name", MANY)
def test_calls_before_the_one_that_was_cut_are_whole(name: str) -> None:
    family, text = FAMILIES[name], body(name)
    assert family.syntax is not None
    assert family.syntax.between is not None
    first = text.removesuffix(family.syntax.block[1])
    second = family.syntax.between + text.removeprefix(family.syntax.block[0])
    for end in range(len(second)):
        calls = family.unfinished(first + second[:end], TOOLS)
        assert (calls[0].name, json.loads(calls[0].arguments), calls[0].complete) == (*ASKED, True)
        assert [call.name for call in calls[1:]] in ([], [ASKED[0]])
        assert json.dumps(ASKED[1], ensure_ascii=False).startswith("".join(call.arguments for call in calls[1:]))
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["gemma4", "function_gemma"])
def test_a_value_that_was_closed_is_read_where_one_quote_opens_and_closes_values(name: str) -> None:
    text = body(name)
    (call,) = FAMILIES[name].unfinished(text[: text.index(",days") + 1], TOOLS)
    assert call.arguments == '{"city": "São Paulo"'
    (call,) = FAMILIES[name].unfinished(text[: text.index("Paulo")], TOOLS)
    assert call.arguments == "", "nothing is closed within a value"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_line_may_begin_a_call_as_each_family_writes_one(name: str) -> None:
    """Whatever the model's own family is."""
    assert all(FAMILIES["mistral"].may_begin_call(TEXTS[name][:end], TOOLS) for end in range(len(TEXTS[name]) + 1))


@pytest.mark.parametrize(
    "text", ["call:get_weather{", "[get_weather(", '{"name": "get_weather"', "[{'name': 'now', 'arg", "[now()]"]
)
def test_a_line_may_begin_a_call_without_marks_too(text: str) -> None:
    assert all(FAMILIES["mistral"].may_begin_call(text[:end], TOOLS) for end in range(len(text) + 1))


@pytest.mark.parametrize("text", ["It is sunny", "[1, 2]", '{"name": "nobody"', "- now(", "[nobody("])
def test_a_line_of_prose_or_of_other_json_begins_no_call(text: str) -> None:
    assert not FAMILIES["mistral"].may_begin_call(text, TOOLS)
