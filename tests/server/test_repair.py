"""A call that is not valid in its family's form is read if it can only mean one thing; all other text stays text."""

import json
import random
from dataclasses import replace

import pytest
from server.asking import events_in
from server.fakes import CARD, ByteTokenizer
from tool_families import ASKED, FAMILIES, TEXTS, TOOLS, tool

from mlx_parallm.core.splitter import AnswerSyntax, Splitter, join_parts
from mlx_parallm.model.tools.formats import HERMES

ROME = ("get_weather", {"city": "Rome"})
JSON = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
PYTHON = "{'name': 'get_weather', 'arguments': {'city': 'Rome'}}"
UNCLOSED = JSON.removesuffix("}")


def read(pieces, family="json_tools", cut=False, repairs=True, tools=TOOLS):
    """The kinds of repair, the text, and each call's name and arguments. What was said before the end, too."""
    told = []
    syntax = AnswerSyntax(
        calls=FAMILIES[family], tools=tuple(tools), max_calls=8, on_repair=told.append if repairs else None
    )
    splitter = Splitter(syntax)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    early = "".join(part.text for part in parts)
    said = join_parts([*parts, *splitter.end(cut)])
    assert told == [kind for _, kind in splitter.repaired]
    assert [call.position for call in said.calls] == list(range(len(said.calls)))
    calls = [(call.name, json.loads(call.arguments) if call.complete else "") for call in said.calls]
    return splitter.repaired, said.text, calls, early


def every_way(text, **options):
    """What a text is, however it is cut into pieces."""
    whole = read([text], **options)[:3]
    assert read(list(text), **options)[:3] == whole
    for seed in range(10):
        cuts = sorted(random.Random(seed).sample(range(1, len(text)), min(len(text) - 1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(pieces, **options)[:3] == whole, pieces
    return whole


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"kimi_k3"}))  # its arguments name types that only the tool knows
@pytest.mark.parametrize("before", ["", "I look.\n\n"])
def test_a_call_in_another_familys_form(name, before):
    family = "json_tools" if name != "json_tools" else "mistral"
    assert every_way(before + TEXTS[name], family=family) == ([(0, "form")], before.rstrip(), [ASKED])


def test_a_value_may_contain_an_end_mark_of_one_character():
    text = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Ro]me"}}]'
    assert every_way(text) == ([(0, "form")], "", [("get_weather", {"city": "Ro]me"})])


BROKEN = [
    ("json_tools", "form", JSON),
    ("json_tools", "form", JSON.replace("arguments", "parameters")),
    ("json_tools", "form", f"<tool_call>{JSON.replace('arguments', 'parameters')}</tool_call>"),
    ("json_tools", "form", f'{{"type": "function", "function": {JSON}}}'),
    ("json_tools", "form", '[get_weather(city="Rome")]'),
    ("mistral", "form", f"[{JSON}]"),
    ("qwen3_coder", "form", f"<tool_call>\n{JSON}\n</tool_call>"),
    ("qwen3_coder", "form", "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>"),
    ("qwen3_coder", "form", "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"),
    ("minimax_m2", "form", '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>'),
    ("json_tools", "end", f"<tool_call>\n{UNCLOSED}\n</tool_call>"),
    ("json_tools", "end", f"<tool_call>\n{UNCLOSED}"),
    ("json_tools", "end", f"<tool_call>\n{JSON}}}\n</tool_call>"),
    ("mistral", "end", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"'),
    ("deepseek_v31", "end", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}'),
    ("qwen3_coder", "end", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>"),
    ("llama3_json", "end", '{"name": "get_weather", "parameters": {"city": "Rome"'),
    ("granite", "end", f"<|tool_call|>[{UNCLOSED}]"),
    ("json_tools", "quotes", f"<tool_call>\n{PYTHON}\n</tool_call>"),
    ("mistral_list", "quotes", f"[TOOL_CALLS][{PYTHON}]"),
    ("mistral", "quotes", "[TOOL_CALLS]get_weather[ARGS]{'city': 'Rome'}"),
    ("phi4_mini_json", "quotes", f"<|tool_call|>[{PYTHON},]"),
    ("cohere_command", "quotes", f"<|START_ACTION|>[{PYTHON}]<|END_ACTION|>"),
    ("llama3_json", "quotes", '{"name": "get_weather", "parameters": {"city": "Rome",}}'),
    ("json_tools", "fence", f"```json\n{JSON}\n```"),
    ("mistral", "fence", f"```\n[{JSON}]\n```\n"),
    ("qwen3_coder", "fence", f"```xml\n<tool_call>\n{JSON}\n</tool_call>\n```"),
    ("gemma4", "fence", f"```tool_code\n{JSON}"),
    ("pythonic", "fence", '```python\n[get_weather(city="Rome")]\n```'),
    ("openai", "fence", f"```tool_call\n{JSON}\n```"),
]


@pytest.mark.parametrize(("family", "kind", "text"), BROKEN)
def test_a_broken_call_is_read(family, kind, text):
    assert every_way(text, family=family) == ([(0, kind)], "", [ROME])
    assert every_way(f"I look.\n{text}\n", family=family) == ([(0, kind)], "I look.", [ROME])


@pytest.mark.parametrize(("family", "kind", "text"), BROKEN)
def test_nothing_is_repaired_if_that_is_off_or_the_text_was_cut(family, kind, text):
    for options in ({"repairs": False}, {"cut": True}):
        assert read([text], family=family, **options)[0] == []


def test_several_calls_of_which_some_are_broken():
    broken, right = f"<tool_call>{PYTHON}</tool_call>", f"<tool_call>{JSON}</tool_call>"
    assert every_way(f"{right}\n{broken}") == ([(1, "quotes")], "", [ROME, ROME])
    assert every_way(f"{broken}\n{right}") == ([(0, "quotes")], "", [ROME, ROME])
    assert every_way(f"{JSON}\n{JSON}") == ([(0, "form"), (1, "form")], "", [ROME, ROME])
    assert every_way(f"```json\n{JSON}\n```\n\n```\n{JSON}\n```") == ([(0, "fence"), (1, "fence")], "", [ROME, ROME])


@pytest.mark.parametrize(
    "text",
    [
        f"Write it like this:\n```json\n{JSON}\n```\nand the weather comes.",
        f"The call {JSON}",
        f"{JSON} is a call.",
        f"{JSON}\nis a call.",
        f"<tool_call>{PYTHON}</tool_call> is wrong.",
        '{"name": "nobody", "arguments": {}}',
        '{"name": "get_weather", "arguments": {}}',
        '{"name": "get_weather", "arguments": {"city": "Rome", "country": "Italy"}}',
        '{"name": "get_weather", "arguments": {"city": "Rome"}, "parameters": {"city": "Paris"}}',
        '{"name": "get_weather", "arguments": {"city": "Ro',
        '{"name": "get_weather"',
        '{"name": "get_weather", "arguments": {"city": "Rome",',
        '[get_weather(city="Ro',
        '[get_weather("Rome")]',
        "{'name': 'get_weather', 'arguments': {'city': 'Rome's'}}",
        "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n</function>",
        "```python\nprint('get_weather')\n```",
        '```json\n{"city": "Rome"}\n```',
        '{"name": "Alice", "age": 3}',
        "[link](https://example.org)\n\n- [ ] now\n",
        "get_weather",
        "<think\n``",
        " \n{\n",
    ],
)
def test_text_that_is_no_call_or_may_mean_something_else_is_unchanged(text):
    for family in ("json_tools", "mistral", "qwen3_coder"):
        assert every_way(text, family=family) == ([], text, [])


def test_a_very_long_call_is_not_repaired():
    """To look for it in every form would take seconds, in which no other request is answered."""
    city = "R" * 16_384
    text = PYTHON.replace("Rome", city)
    assert read([text], family="json_tools")[:3] == ([], text, [])
    shorter = PYTHON.replace("Rome", city[:8000])
    assert read([shorter], family="json_tools")[0] == [(0, "quotes")]


def test_two_readings_are_none():
    """Without a schema that tells the argument's type, but with marks that two families have."""
    twice = (tool("note", properties={"text": {"type": "string"}}), *TOOLS)
    text = '{"name": "note", "function": "now", "arguments": {}}'
    assert every_way(text, tools=twice) == ([], text, [])


def test_other_arguments_are_taken_where_the_schema_allows_them():
    loose = tool("note", properties={}, additionalProperties=True)
    assert every_way('{"name": "note", "arguments": {"any": 1}}', tools=[loose])[2] == [("note", {"any": 1})]


@pytest.mark.parametrize(
    "text",
    [
        "Ordinary text.\nWith a second line",
        "```python\nprint(1)\n```\nThis prints 1",
        '{"city": "Rome",\n"days": 3}',
        '[\n  {"name": "Alice"}\n]',
        f"```json\n{JSON}\n```\nThat is how a call looks",
        "- [ ] a task\n[a link](x)",
        "<b>bold</b>",
    ],
)
def test_ordinary_text_is_not_held_back(text):
    assert read(list(text))[3] == text


# -- through the server --------------------------------------------------------------------------

USER = [{"role": "user", "content": "hi"}]
REPAIRED = [{"position": 0, "kind": "quotes"}]


@pytest.fixture
def make(make_client, engine):
    def client(**config):
        tokenizer = ByteTokenizer()
        tokenizer.tool_format = replace(HERMES, in_template=True)
        engine.text = f"I look.\n<tool_call>{PYTHON}</tool_call>"
        return make_client(replace(CARD, context_length=100_000), tokenizer, **config)

    return client


async def chat(client, **body):
    response = await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response


async def test_the_answer_names_the_call_and_a_metric_counts_it(make):
    client = make()
    (choice,) = (await chat(client)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ROME
    assert choice["repaired_tool_calls"] == REPAIRED
    metrics = (await client.get("/metrics")).text
    assert 'mlx_parallm_tool_calls_repaired_total{kind="quotes"} 1.0' in metrics


async def test_a_stream_names_the_call_in_its_last_chunk(make):
    chunks = [chunk["choices"][0] for chunk in events_in(await chat(make(), stream=True))]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I look."
    assert [call["function"]["name"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())] == [ROME[0]]
    assert [chunk.get("repaired_tool_calls") for chunk in chunks] == [None] * (len(chunks) - 1) + [REPAIRED]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 1000, "messages": USER, "tools": [{"name": "now", "input_schema": {}}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "now", "parameters": {}}]}),
        ("/api/chat", {"model": "", "messages": USER, "tools": list(TOOLS), "stream": False}),
    ],
)
async def test_other_apis_name_the_call(make, engine, path, body):
    client = make()
    engine.text = '{"name": "now", "arguments": {}}'
    if path == "/api/chat":
        body["model"] = CARD.name
    whole = (await client.post(path, json=body)).json()
    assert whole["repaired_tool_calls"] == [{"position": 0, "kind": "form"}]
    if path == "/v1/messages":
        assert whole["stop_reason"] == "tool_use"
    if path != "/api/chat":
        streamed = events_in(await client.post(path, json={**body, "stream": True}))
        ends = [event for event in streamed if event["type"] in ("message_delta", "response.completed")]
        (end,) = (event.get("response", event) for event in ends)
        assert end["repaired_tool_calls"] == [{"position": 0, "kind": "form"}]


COLLECTED = {"collect_trajectory": True, "scoring_function": "exact", "metadata": {"answer": "4"}}


@pytest.mark.parametrize(
    ("config", "body"),
    [
        ({}, COLLECTED),
        ({}, {"return_token_ids": True}),
        ({}, {"tool_choice": "none"}),
        ({"repair_tool_calls": False}, {}),
    ],
)
async def test_what_may_be_trained_on_keeps_its_text(make, engine, config, body):
    (choice,) = (await chat(make(**config), **body)).json()["choices"]
    assert choice["message"]["content"] == engine.text
    assert "repaired_tool_calls" not in choice
