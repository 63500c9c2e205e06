"""Tools together with structured output: an answer is either calls, or has the format."""

import json

import pytest
from server.test_tools import CALL, NAMED, NOW, THINK, URL, USER, ask, client, make, streamed, without_ids, written
from tool_families import FAMILIES, TEXTS, TOOLS, tool
from walks import follows

__all__ = ["client", "make"]  # fixtures

FORMAT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMATS = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": FORMAT}}},
    "object": {"response_format": {"type": "json_object"}},
    "guided": {"guided_json": FORMAT},
    "regex": {"guided_regex": r'\{"n": [0-9]/?\}'},
    "choice": {"structured_outputs": {"choice": ['{"n": 1}', "no"]}},
    "grammar": {"guided_grammar": 'root ::= "{\\"n\\": " [0-9] "}"'},
}
ANSWER = '{"n": 1}'


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("choice", "good"), [("auto", "call answer"), ("required", "call"), (NAMED, "call"), ("none", "answer")], ids=str
)
async def test_with_a_format_an_answer_is_calls_or_has_the_format(make, engine, name, choice, good):
    family = FAMILIES[name]
    client = make(family)
    if choice == "auto" and name == "llama3_json":
        refused = await client.post(URL, json={"messages": USER, "tools": TOOLS, **FORMATS["schema"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
        return
    await ask(client, tool_choice=choice, **FORMATS["schema"])
    grammar = engine.requests[-1].grammar
    call = written(family, "now")
    assert follows(grammar, call) == ("call" in good)
    assert follows(grammar, ANSWER) == ("answer" in good)
    assert not any(follows(grammar, text) for text in ("Words.", f"Words.{call}", f"{call}{ANSWER}", ANSWER + call))


@pytest.mark.parametrize("fields", FORMATS.values(), ids=FORMATS)
async def test_every_way_to_ask_for_a_format_goes_with_tools(client, engine, fields):
    await ask(client, **fields)
    grammar = engine.requests[-1].grammar
    assert follows(grammar, ANSWER)
    assert follows(grammar, NOW)
    assert not follows(grammar, "Words.")


async def test_numbers_are_bounded_in_the_format_and_not_in_calls(make, engine):
    client = make(FAMILIES["qwen3_coder"])
    text = tool("f", properties={"a": {"type": "string"}}, required=["a"])
    await ask(client, tools=[text], guided_json={"type": "number"})
    grammar, digits = engine.requests[-1].grammar, "1" * 60
    assert follows(grammar, TEXTS["qwen3_coder"].split("<function")[0] + _argument(digits))
    assert follows(grammar, "0.5")
    assert not follows(grammar, f"0.{digits}")


def _argument(text):
    return f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"


async def test_with_a_format_reasoning_comes_first(make, engine):
    await ask(make(reasoning=THINK), **FORMATS["schema"])
    grammar = engine.requests[-1].grammar
    assert follows(grammar, f"{{think}} anything {{/think}}{ANSWER}")
    assert follows(grammar, f"{{think}} anything {{/think}}{NOW}")
    assert not follows(grammar, "{think} anything {/think}Words.")


@pytest.mark.parametrize("text", [ANSWER, NOW, f"{NOW}\n{CALL}", json.dumps({"a": f"x {NOW} y"})])
async def test_a_call_inside_a_string_of_the_format_is_not_a_call(client, engine, text):
    engine.text = text
    (whole,), (stream,) = await ask(client, **FORMATS["object"]), await streamed(client, **FORMATS["object"])
    assert without_ids([whole]) == without_ids([stream])
    called = text.startswith("<")
    assert ("tool_calls" in whole["message"], whole["finish_reason"]) == (called, "tool_calls" if called else "stop")
    assert whole["message"]["content"] == (None if called else text)
