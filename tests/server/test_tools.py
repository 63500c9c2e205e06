"""Tools and reasoning in chat: the request to the engine, and the answer."""

import json
from dataclasses import replace

import pytest
from server.asking import answered, fault, refusal
from server.fakes import CARD, ByteTokenizer, RecordingTokenizer
from tool_families import ASKED, FAMILIES, TEXTS, TOOLS, tool
from walks import follows

from mlx_parallm.core.text import Reasoning
from mlx_parallm.model.tools.formats import HERMES

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CALL = TEXTS["json_tools"]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "now"}}
THINK = Reasoning("{think}", "{/think}")


@pytest.fixture
def make(make_client):
    """`make(format, reasoning)` → a client of a server whose model is of that family."""

    def client(tool_format=replace(HERMES, in_template=True), reasoning=None):  # noqa: B008 - frozen
        tokenizer = ByteTokenizer()
        tokenizer.tool_format, tokenizer.reasoning = tool_format, reasoning
        return make_client(replace(CARD, context_length=100_000), tokenizer)

    return client


@pytest.fixture
def client(make):
    return make()


async def ask(client, **body):
    return (await answered(client, URL, {"messages": USER, "tools": TOOLS, **body}))["choices"]


async def streamed(client, n=1, **body):
    """The stream's choices, joined as clients join them, each a message with its finish reason."""
    response = await client.post(URL, json={"messages": USER, "tools": TOOLS, "stream": True, "n": n, **body})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    choices = [{"message": {"content": None}, "finish_reason": None, "index": index} for index in range(n)]
    for chunk in map(json.loads, lines[:-1]):
        for one in chunk["choices"]:
            join(choices[one["index"]], one)
    return choices


def join(choice, chunk):
    message, delta = choice["message"], chunk["delta"]
    choice["finish_reason"] = chunk["finish_reason"] or choice["finish_reason"]
    for name in {"role", "content", "reasoning", "reasoning_content"} & delta.keys():
        if delta[name] is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for more in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if more["index"] == len(calls):
            calls.append({"id": more["id"], "type": more["type"], "function": {"name": "", "arguments": ""}})
        calls[more["index"]]["function"]["name"] += more["function"].get("name", "")
        calls[more["index"]]["function"]["arguments"] += more["function"]["arguments"]


def without_ids(choices):
    """The ids of calls are drawn anew each time; logprobs are compared elsewhere."""
    assert all(call.pop("id") for choice in choices for call in choice["message"].get("tool_calls", ()))
    return [{name: choice[name] for name in ("index", "message", "finish_reason")} for choice in choices]


async def test_a_call(client, engine):
    engine.text = CALL
    (choice,) = await ask(client)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    function = call.pop("function")
    assert call == {"type": "function"}
    assert (function["name"], json.loads(function["arguments"])) == ASKED


@pytest.mark.parametrize(
    "text",
    ["Hi ä!", CALL, f"I look.\n{CALL}\n{NOW}", f"{CALL} more", "<tool_call>no</tool_call>", "a <tool", "", " \n x \n "],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_equals_the_whole(client, engine, text, n):
    engine.text = text
    assert without_ids(await streamed(client, n=n)) == without_ids(await ask(client, n=n))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop"), ("none", "stop")],
    ids=str,
)
async def test_finish_reasons_are_openais(client, engine, choice, reason):
    engine.text = NOW
    (whole,), (stream,) = await ask(client, tool_choice=choice), await streamed(client, tool_choice=choice)
    assert (whole["finish_reason"], stream["finish_reason"]) == (reason, reason)
    assert ("tool_calls" in whole["message"]) == (choice != "none")


async def test_at_most_one_call(client, engine):
    engine.text = f"{CALL}\n{NOW}"
    (choice,) = await ask(client, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("required", True, [0, 1], ["words"]),
        ("required", False, [0], ["words"]),
        (NAMED, True, [1], ["words", 0]),
    ],
    ids=["required", "one", "named"],
)
async def test_a_call_is_enforced(make, engine, name, choice, parallel, good, bad):
    family = FAMILIES[name]
    client = make(family)
    texts = [written(family, "get_weather"), written(family, "now"), "I would rather talk"]
    await ask(client, tool_choice=choice, parallel_tool_calls=parallel)
    grammar = engine.requests[-1].grammar
    assert all(follows(grammar, texts[at]) for at in good)
    assert not any(follows(grammar, texts[-1] if at == "words" else texts[at]) for at in bad)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_are_called(make, engine, name, mode):
    """The model sees the others too, so that the prompt stays the same."""
    family = FAMILIES[name]
    client = make(family)
    await ask(client)
    whole = engine.prompt_text
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    await ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    grammar = engine.requests[-1].grammar
    assert engine.prompt_text == whole
    assert follows(grammar, written(family, "now"))
    assert not follows(grammar, written(family, "get_weather"))
    assert follows(grammar, "I would rather talk") is (mode == "auto")


def written(family, name):
    """A call with the arguments that are required."""
    arguments = {"city": "x"} if name == "get_weather" else {}
    return family.syntax.lead + family.written([{"name": name, "arguments": arguments}])


async def test_auto_enforces_nothing_unless_a_tool_is_strict(client, engine):
    await ask(client)
    assert engine.requests[-1].grammar is None
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    await ask(client, tools=strict)
    grammar = engine.requests[-1].grammar
    assert follows(grammar, "Words.")
    assert follows(grammar, f"Words. {CALL}")
    assert not follows(grammar, f"Words. {CALL.replace('city', 'town')}")


async def test_the_template_gets_the_tools_unless_none_may_be_called(client, engine):
    await ask(client)
    assert "tools=" in engine.prompt_text
    await ask(client, tool_choice="none")
    assert "tools=" not in engine.prompt_text
    assert engine.requests[-1].grammar is None


async def test_tools_are_described_in_messages_if_the_template_has_none(make, engine):
    client = make(HERMES)
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
    ]
    await ask(client, messages=turns)
    system, _, rest = engine.prompt_text.partition("u:hi\n")
    assert system.startswith("s:Be brief.\n\nYou can call functions.")
    assert all(json.dumps(each["function"]) in system for each in TOOLS)
    results = "".join(f"<tool_response>\n{said}\n</tool_response>\n" for said in ("noon", "one"))
    assert rest == f"a:{NOW}\n{NOW}\nu:{results}a:"


async def test_calls_of_earlier_turns_reach_the_template_as_objects(make_client):
    tokenizer = RecordingTokenizer()
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "now", "arguments": '{"a": 1}'}}
    odd = {"id": "d", "function": {"name": "now", "arguments": "not JSON"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]}
    turns = [*USER, {"role": "assistant", "tool_calls": [call, odd], "reasoning": "Hm."}, result]
    await ask(make_client(tokenizer=tokenizer), messages=turns)
    _, said, told = tokenizer.given[0]
    assert [each["function"]["arguments"] for each in said["tool_calls"]] == [{"a": 1}, "not JSON"]
    assert (said["content"], said["reasoning_content"]) == ("", "Hm.")
    assert told == {"role": "tool", "tool_call_id": "c", "content": "noon"}


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"a": [1, "ä"]}, {"a": [1, "ä"]}),
        ('{"s": "\\ud83d", "\\ud83d": 1}', {"s": "?", "?": 1}),
        ('{"s": "\\ud83d\\ude00"}', {"s": "😀"}),
        ('{"a": 1e400}', '{"a": 1e400}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": [-Infinity]}', '{"a": [-Infinity]}'),
    ],
)
async def test_arguments_of_earlier_calls_are_json_that_utf_8_can_carry(make_client, sent, shown):
    """Half of an emoji, which JavaScript writes as an escape, is no text. JSON has no infinite numbers."""
    tokenizer = RecordingTokenizer()
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": sent}}
    turns = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    await ask(make_client(tokenizer=tokenizer), messages=turns)
    assert tokenizer.given[0][1]["tool_calls"][0]["function"]["arguments"] == shown


@pytest.mark.parametrize("begun", [False, True])
async def test_reasoning_is_a_field_of_its_own(make, engine, begun):
    client = make(HERMES, THINK)
    messages = [{"role": "assistant", "content": "{think}"}] if begun else USER
    engine.text = ("" if begun else "{think}\n") + f"Hm.\n{{/think}}\n\nI look.\n{NOW}"
    fields = {"messages": messages, "add_generation_prompt": not begun}
    (whole,), (stream,) = await ask(client, **fields), await streamed(client, **fields)
    message = whole["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "I look.")
    assert without_ids([whole]) == without_ids([stream])


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": [], "guided_choice": ["yes"]}], ids=str)
async def test_grammars_begin_after_the_reasoning(make, engine, fields):
    await ask(make(reasoning=THINK), **fields)
    grammar = engine.requests[-1].grammar
    right = NOW if "tool_choice" in fields else "yes"
    assert follows(grammar, right)
    assert follows(grammar, f"{{think}} anything {{/think}}{right}")
    assert not follows(grammar, "{think} anything")
    assert not follows(grammar, "anything")


FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": TOOLS}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nobody"}}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "collect_trajectory": True}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [
            TOOLS[0], tool("f", properties={"a": {"type": "objekt"}})]}, "tools[1].function.parameters"),
        ({"tool_choice": "required", "collect_trajectory": True}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"tool_choice": NAMED, "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "tools": [TOOLS[0], tool("f", properties={"a": {"type": "objekt"}})]},
         "tools[1].function.parameters"),
        ({"tool_choice": "required", "tools": [tool("f", properties={"a": {"type": "string", "pattern": "("}})]},
         "tools[0].function.parameters"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*USER, {"role": "user", "content": "x", "tool_calls": [
            {"id": "c", "function": {"name": "f"}}]}]}, "messages[1].tool_calls"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
         "messages[1].tool_calls[0].function"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
async def test_invalid_tools_are_refused_by_name(client, engine, fields, param):
    await refusal(client.post(URL, json={"messages": USER, "tools": TOOLS, **fields}), 400, param=param)
    assert engine.requests == []
    assert (await client.post(URL, json={"messages": USER})).status_code == 200


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.syntax is not None])
async def test_what_no_call_can_follow_is_said_of_the_schema_alone(make, name):
    """Its grammar is the server's own."""
    bad = tool("f", properties={"a": {"type": "integer", "not": {"const": 1}}})
    body = {"messages": USER, "tool_choice": "required", "tools": [TOOLS[1], bad]}
    told = fault(await make(FAMILIES[name]).post(URL, json=body))["message"]
    assert told == 'tools[1].function.parameters: this tool call cannot be enforced: not supported: "not"'
