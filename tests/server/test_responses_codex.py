"""What Codex sends to `/v1/responses`, and what it reads of the answer."""

import json
from dataclasses import replace

import httpx
import pytest
from openai.types.responses import Response
from server.asking import answered, refusal
from server.fakes import CARD, RecordingTokenizer
from server.test_responses_stream import assert_sums_up, events_of

from mlx_parallm.server import streams
from mlx_parallm.server.api.responses.output import InputText

URL = "/v1/responses"
NOW = {"type": "function", "name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [NOW]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH = {"type": "web_search", "external_web_access": False}
TURN = {
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Edit."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ],
    "tools": [SEARCH, NOW, AGENTS, PATCH, {"type": "tool_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "i"},
    "text": {"verbosity": "low"},
}
"""A turn as Codex 0.169 sends it, with fewer tools."""


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture
def tokenizer():
    return RecordingTokenizer()


@pytest.fixture
def client(make_client, tokenizer):
    return make_client(replace(CARD, context_length=10_000), tokenizer)


async def respond(client, **fields):
    answer = await answered(client, URL, TURN | fields)
    Response.model_validate(answer)
    return answer


async def test_tools_that_only_other_servers_run_are_left_out_and_named(client, tokenizer):
    response = await client.post(URL, json=TURN)
    assert response.headers["x-ignored-fields"] == "tools.web_search, tools.tool_search"
    assert [tool["type"] for tool in response.json()["tools"]] == ["function", "namespace", "custom"]
    shown = [tool["function"] for tool in tokenizer.given[1]["tools"]]
    assert [function["name"] for function in shown] == ["now", "agents__now", "apply_patch"]
    assert shown[1] == {**shown[0], "name": "agents__now"}
    text = {"type": "string", "description": "A text of this grammar:\nstart: /.+/"}
    assert shown[2]["parameters"] == {"type": "object", "properties": {"input": text}, "required": ["input"]}


async def test_a_function_of_a_namespace_is_answered_with_both_names(client, engine, tokenizer):
    engine.text = written("agents__now", {})
    got = await respond(client)
    (call,) = got["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "now")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    await respond(client, input=[*TURN["input"], call, output])
    _, _, turn, result = tokenizer.given[0]
    assert turn["tool_calls"][0]["function"] == {"name": "agents__now", "arguments": {}}
    assert result["content"] == "noon"


async def test_a_custom_tool_gets_a_text(client, engine, tokenizer):
    engine.text = written("apply_patch", {"input": "*** Begin\n“ä”\n"})
    got = await respond(client)
    (call,) = got["output"]
    assert call.pop("id").startswith("ctc_")
    kept = {"type": "custom_tool_call", "status": "completed", "call_id": call["call_id"], "name": "apply_patch"}
    assert call == {**kept, "input": "*** Begin\n“ä”\n"}
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    await respond(client, input=[*TURN["input"], call, output])
    _, _, turn, result = tokenizer.given[0]
    assert turn["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin\n“ä”\n"}}
    assert result["content"] == "Done."


async def test_the_text_of_a_custom_tool_is_streamed(client, engine):
    engine.text = written("apply_patch", {"input": 'a\n"'})
    body = {**TURN, "tool_choice": {"type": "custom", "name": "apply_patch"}, "stream": True}
    events = events_of((await client.post(URL, json=body)).text)
    assert_sums_up(events)
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert pieces == ["a", "\n", '"']


@pytest.mark.parametrize(
    "text", ["plain", '\\ and "', "a\nb\té “ 😀", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_text_is_the_same_however_its_json_is_cut(text, ascii_only):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    for size in range(1, len(arguments) + 1):
        parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        reader = InputText()
        assert "".join(reader.add(part, part is parts[-1]) for part in parts) == text


def test_other_arguments_of_a_custom_tool_are_the_text():
    assert InputText().add('{"patch": "x"}', complete=True) == '{"patch": "x"}'


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**NOW, "name": "a b"}, "tools[4].name"),
        ({**AGENTS, "name": "more", "tools": [NOW, {**NOW, "name": "b", "parameters": {"type": 5}}]},
         "tools[4].tools[1].parameters"),
        ({**PATCH, "name": "a b"}, "tools[4].name"),
        (AGENTS, "tools"),
    ],
    ids=str,
)  # fmt: skip
async def test_an_error_names_the_tool_as_it_was_sent(client, tool, param):
    body = {**TURN, "tools": [SEARCH, NOW, AGENTS, PATCH, tool], "tool_choice": "required"}
    await refusal(client.post(URL, json=body), 400, param=param)


async def test_a_stream_is_kept_open_by_events(serving, engine, monkeypatch):
    """Codex measures the silence between events, and comments are none."""
    monkeypatch.setattr(streams, "PING_INTERVAL_S", 0.02)
    engine.pause_before = 0
    async with serving() as server, httpx.AsyncClient() as client:
        body = {"input": "hi", "stream": True}
        text = ""
        async with client.stream("POST", f"{server.url}{URL}", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if text.count("event: response.in_progress") == 3:
                    engine.go_on.set()
    kinds = [event["type"] for event in events_of(text)]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert kinds[-1] == "response.completed"
    assert ": ping" not in text


async def test_an_empty_conversation_loads_the_model(client, engine):
    response = await client.post(URL, json={"input": []})
    got = response.json()
    Response.model_validate(got)
    assert (got["status"], got["output"], got["usage"]["total_tokens"]) == ("completed", [], 0)
    assert not engine.requests
    await refusal(client.post(URL, json={"input": [], "model": "nobody"}), 404, code="model_not_found")
