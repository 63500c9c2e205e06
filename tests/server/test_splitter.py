"""The splitter returns the same reasoning, text and calls however a text is cut into pieces."""

import json
import random
import re
import time

import pytest
from tool_families import ASKED, ENDINGS, FAMILIES, OTHER_TEXTS, TEXTS, TOOLS

from mlx_parallm.core.splitter import AnswerSyntax, Splitter, join_parts
from mlx_parallm.core.text import Reasoning
from mlx_parallm.model.tools.thinking import REASONINGS

THINK = Reasoning("<think>", "</think>")
XTML = Reasoning(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
HERMES = FAMILIES["json_tools"]
CALL = TEXTS["json_tools"]


def split(pieces, cut=False, **options):
    """Reasoning, text, and each call's name and arguments."""
    said = parts_of(pieces, cut, **options)
    return said.reasoning, said.text, [(call.name, json.loads(call.arguments)) for call in said.calls]


def parts_of(pieces, cut=False, **options):
    splitter = Splitter(AnswerSyntax(**options))
    parts = [part for piece in pieces for part in splitter.feed(piece)] + list(splitter.end(cut))
    said = join_parts(parts)
    assert splitter.called == (bool(said.calls) and all(call.complete for call in said.calls))
    assert all(sum([bool(part.reasoning), bool(part.text), part.call is not None]) == 1 for part in parts)
    assert [call.position for call in said.calls] == list(range(len(said.calls)))
    assert len({call.call_id for call in said.calls}) == len(said.calls)
    return said


def every_way(text, **options):
    """What `text` is, having been cut in two at every place, into single characters, and at random."""
    whole = split([text], **options)
    ways = [[text[:at], text[at:]] for at in range(1, len(text))]
    ways.append(list(text))
    for seed in range(20):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(1, 9)))) if len(text) > 1 else []
        ways.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for way in ways:
        assert split(way, **options) == whole, way
    return whole


def tools(family=HERMES, most=8):
    return {"calls": family, "tools": TOOLS, "max_calls": most}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_every_family(name):
    assert every_way(TEXTS[name], **tools(FAMILIES[name])) == ("", "", [ASKED])
    told_before = every_way(f"I shall look.\n\n{TEXTS[name]}", **tools(FAMILIES[name]))
    assert told_before == ("", "I shall look.", [ASKED])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_the_model_left_unfinished_is_text_or_a_call_and_never_lost(name):
    text = TEXTS[name]
    for end in range(1, len(text)):
        reasoning, said, calls = split(list(text[:end]), **tools(FAMILIES[name]))
        assert reasoning == ""
        assert (said == text[:end].rstrip() or said == text[:end]) if not calls else calls[0][0] == ASKED[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("before", ["", "I look.\n"])
def test_nothing_of_a_call_that_was_cut_off_is_text(name, before):
    family, whole = FAMILIES[name], json.dumps(ASKED[1], ensure_ascii=False)
    named = None
    for end in range(len(family.starts[0]) // 2 + 1, len(TEXTS[name])):
        text = before + TEXTS[name][:end]
        said = parts_of(list(text), cut=True, **tools(family))
        assert said.text == before.rstrip(), text
        assert without_id(said) == without_id(parts_of([text], cut=True, **tools(family)))
        for call in said.calls:
            named = call.name
            assert whole.startswith(call.arguments)
    assert named == ASKED[0]


def without_id(said):
    return [(call.name, call.arguments, call.complete) for call in said.calls]


@pytest.mark.parametrize(
    "text",
    [
        "a <",
        "use <to",
        "<tool_call>x",
        "<tool_call> is a mark",
        '<tool_call>{"name": "nobody", "arguments": {"a": 1',
        "<tool_call>no</tool_call> and",
        "Hello \n",
    ],
)
def test_text_that_only_looks_like_a_call_stays_text_when_cut_off(text):
    assert split(list(text), cut=True, **tools()) == ("", text, [])
    assert split([text], cut=True, **tools()) == ("", text, [])


def test_text_that_rules_out_calls_keeps_its_order():
    """Also if its beginning was held back because it might have begun a call to repair."""
    text = "<|tool_call_start|>[get_weather(days=3)] and more"
    repairs = {"calls_first": True, "on_repair": lambda kind: None}
    assert every_way(text, **tools(FAMILIES["granite-20b-fc"]), **repairs) == ("", text, [])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mistral", "mistral_list", "openai"}))
def test_several_calls_and_text_between(name):
    text = f"One.\n{TEXTS[name]}\n{TEXTS[name]} Two.\n"
    assert every_way(text, **tools(FAMILIES[name])) == ("", "One.Two.\n", [ASKED, ASKED])


def test_text_after_the_last_allowed_call_is_dropped():
    assert every_way(f"{CALL}\n{CALL} and so on", **tools(most=1)) == ("", "", [ASKED])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        "Hello \n<tool_call>\nnothing\n</tool_call> and more",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        "a < b and <tool and <tool_cal",
        "<tool_call><tool_call>",
        "  \n leading and trailing \n ",
        "</tool_call>",
        " ",
    ],
)
def test_text_that_is_not_a_call_is_unchanged(text):
    assert every_way(text, **tools(), reasoning=THINK) == ("", text, [])


def test_an_end_mark_inside_a_value_does_not_end_the_call():
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "\\"</tool_call>"}}</tool_call>'
    assert every_way(text, **tools()) == ("", "", [("get_weather", {"city": '"</tool_call>'})])


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, ("Hm.", "Yes.\n")),
        ("\n<think>Hm.</think>Yes.", False, ("Hm.", "Yes.")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("\nHm.", True, ("Hm.", "")),
        ("</think>", True, ("", "")),
        ("<think></think>", False, ("", "")),
        ("Yes, <think> is a mark.</think>", False, ("", "Yes, <think> is a mark.</think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>a</thin", False, ("a</thin", "")),
        ("<think>a<think>b</think>c</think>", False, ("a<think>b", "c</think>")),
    ],
)
def test_reasoning(text, begun, expected):
    assert every_way(text, reasoning=THINK, in_reasoning=begun) == (*expected, [])


def test_reasoning_text_and_calls():
    text = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}\n"
    assert every_way(text, reasoning=THINK, **tools()) == ("Where?", "I look.", [ASKED, ASKED])
    assert every_way(f"{CALL}</think>{CALL}", reasoning=THINK, in_reasoning=True, **tools()) == (CALL, "", [ASKED])


def test_marks_around_the_answer_are_removed():
    text = (
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        f"{TEXTS['kimi_k3']}<|close|>message<|sep|>"
    )
    assert every_way(text, reasoning=XTML, **tools(FAMILIES["kimi_k3"])) == ("Hm.", "I look.", [ASKED])


def test_call_ids_of_the_model_are_kept_if_unique():
    splitter = Splitter(AnswerSyntax(**tools(FAMILIES["kimi_k2"])))
    parts = [*splitter.feed(TEXTS["kimi_k2"] * 2), *splitter.end()]
    first, second = (call.call_id for call in join_parts(parts).calls)
    assert first == "functions.get_weather:0"
    assert second.startswith("call_")


def test_text_is_returned_as_soon_as_possible():
    splitter = Splitter(AnswerSyntax(reasoning=THINK, **tools()))
    shown = [join_parts(splitter.feed(piece)).text for piece in ("Hel", "lo ", "<to", "ol> ", "x")]
    assert shown == ["Hel", "lo", "", " <tool>", " x"]
    plain = Splitter(AnswerSyntax())
    assert join_parts(plain.feed(" <tool_")).text == " <tool_"


HARMONY = {"reasoning": REASONINGS["openai_gptoss"], **tools(FAMILIES["openai"])}


def channel(name, text, end="<|end|><|start|>assistant"):
    return f"<|channel|>{name}<|message|>{text}{end}"


def test_harmony_thinks_speaks_and_calls():
    """`<|call|>` and `<|return|>` are end-of-sequence tokens, which are no text."""
    thought, more = channel("analysis", "Where is it?\n\nBrazil."), channel("analysis", "Good.")
    preamble = channel("commentary", "I look it up. ")
    assert every_way(thought + channel("final", "Hello!", ""), **HARMONY) == ("Where is it?\n\nBrazil.", "Hello!", [])
    assert every_way(channel("final", "Hello!", ""), **HARMONY) == ("", "Hello!", [])
    called = every_way(thought + preamble + more + TEXTS["openai"], **HARMONY)
    assert called == ("Where is it?\n\nBrazil.Good.", "I look it up.", [ASKED])
    asked_for = "<|channel|>final <|constrain|>json<|message|>{}"
    assert every_way(thought + asked_for, **HARMONY) == ("Where is it?\n\nBrazil.", "{}", [])


def test_harmony_that_is_cut_off_shows_no_mark():
    text = channel("analysis", "Hm.") + channel("commentary", "I look.") + TEXTS["openai"]
    tokens = re.findall(r"<\|\w+\|>|.[^<]{0,4}", text)
    for end in range(1, len(tokens)):
        said = parts_of(tokens[:end], cut=True, **HARMONY)
        assert "<|" not in said.text + said.reasoning, tokens[:end]
        assert "I look.".startswith(said.text)


def test_command_speaks_between_marks():
    marks = {"reasoning": REASONINGS["cohere_command"], **tools(FAMILIES["cohere_command"])}
    thought = "<|START_THINKING|>Hm.<|END_THINKING|>"
    assert every_way(f"{thought}<|START_RESPONSE|>Hello!<|END_RESPONSE|>", **marks) == ("Hm.", "Hello!", [])
    assert every_way(thought + TEXTS["cohere_command"], **marks) == ("Hm.", "", [ASKED])


@pytest.mark.parametrize(
    "text",
    [
        'The object {"name": "Bob", "parameters": {"age": 3}} is one.',
        '{"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}',
        'An open one: {"name": "get_weather',
    ],
)
def test_an_object_that_is_no_call_is_text(text):
    assert every_way(text, **tools(FAMILIES["llama3_json"])) == ("", text, [])


@pytest.mark.parametrize(("name", "beginning"), OTHER_TEXTS)
def test_a_call_in_another_form_of_its_family(name, beginning):
    text = beginning + json.dumps(ASKED[1], ensure_ascii=False) + ENDINGS.get(name, "")
    assert every_way(text, **tools(FAMILIES[name])) == ("", "", [ASKED])


@pytest.mark.parametrize("name", ["json_tools", "kimi_k2", "mistral", "openai"])
def test_arguments_that_are_nested_too_deeply_are_no_call(name):
    before, after = TEXTS[name].split(json.dumps(ASKED[1], ensure_ascii=False))
    text = before + '{"city": ' * 3000 + after
    assert split([text], **tools(FAMILIES[name])) == ("", text, [])


LONG, MOST_S = 60_000, 2.0
"""Characters, and processor time. All other requests wait while a text is read."""


@pytest.mark.parametrize("name", ["glm47", "longcat", "muse_spark", "minimax_m2", "deepseek_v4"])
def test_arguments_that_are_never_closed_take_no_time(name):
    """Reading them must not take the square of their length, which is seconds, or its cube, which is minutes."""
    opened, _, rest = TEXTS[name].partition("São Paulo")
    again = re.sub("</[^>]*(value|parameter)>", "", rest[: rest.index("3")])
    text, began = opened + again * (LONG // len(again)), time.process_time()
    for cut in (False, True):
        parts_of([text], cut, **tools(FAMILIES[name]))
    assert time.process_time() - began < MOST_S


@pytest.mark.parametrize("name", ["json_tools", "glm47", "pythonic", "kimi_k2", "deepseek_v31", "deepseek_v4"])
def test_a_long_run_of_white_space_takes_no_time(name):
    text, began = TEXTS[name], time.process_time()
    for at in range(len(text) // 2, len(text), len(text) // 6):
        for cut in (False, True):
            parts_of([text[:at] + " " * LONG + ("" if cut else text[at:])], cut, **tools(FAMILIES[name]))
    assert time.process_time() - began < MOST_S


NOT_CLOSED = '{"name": "get_weather", "parameters": {"city": "' + "P" * 8000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>" + "call:now{" * (LONG // 9)),
        ("minicpm5", "<function name=" + "P" * LONG + '"x y>'),
        ("kimi_k3", TEXTS["kimi_k3"].replace("key=", "P" * LONG + "key=")),
        ("mistral", TEXTS["mistral"].replace("[ARGS]", "P" * LONG + "x [ARGS]")),
        ("pythonic", TEXTS["pythonic"].replace("days", "P" * LONG + " days")),
        ("json_tools", f"{NOT_CLOSED}<|tool_call_end|>{'P' * 8000}"),  # it is read in the form of every family
        ("json_tools", '"get_weather' + '"' * 16_000),
        ("json_tools", "[\n" * (LONG // 2)),
        ("json_tools", "a\n" * LONG),  # each line may begin a call
    ],
)
def test_a_long_text_that_is_no_call_takes_no_time(name, text):
    began = time.process_time()
    assert parts_of([text], on_repair=lambda kind: None, **tools(FAMILIES[name])).text == text
    assert time.process_time() - began < MOST_S
