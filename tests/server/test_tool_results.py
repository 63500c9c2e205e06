"""Results of tools whose calls the conversation does not have."""

from __future__ import annotations

import pytest

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
USER = {"role": "user", "content": "q"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
OTHER = {**RESULT, "tool_call_id": "other"}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "r"}
OTHER_ITEM = {**RESULT_ITEM, "call_id": "other"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
USED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}
OTHER_USED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "other", "content": "r"}]}
OLLAMA_CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}


async def ask(client, path, conversation):
    body = {"input" if path.startswith(RESPONSES) else "messages": conversation, "model": "base"}
    return await client.post(path, json={**body, **({"max_tokens": 5} if path == MESSAGES else {})})


@pytest.mark.parametrize(
    ("path", "conversation", "param"),
    [
        (CHAT, [USER, RESULT], "messages[1]"),
        (CHAT, [USER, CALL, OTHER], "messages[2]"),
        (CHAT, [USER, RESULT, CALL], "messages[1]"),
        (CHAT, [RESULT], "messages[0]"),
        ("/tokenize", [USER, RESULT], "messages[1]"),
        (RESPONSES, [RESULT_ITEM], "input"),
        (RESPONSES, [USER, CALL_ITEM, OTHER_ITEM], "input"),
        (RESPONSES + "/input_tokens", [USER, OTHER_ITEM], "input"),
        (MESSAGES, [USER, USE, OTHER_USED], "messages"),
        (OLLAMA, [USER, OLLAMA_CALL, OTHER], "messages"),
    ],
)
async def test_a_result_without_its_call_is_refused_and_names_the_id(client, engine, path, conversation, param):
    response = await ask(client, path, conversation)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"no earlier message has the call '{'other' if 'other' in str(conversation) else 'c'}'" in message
    assert param in message
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "conversation"),
    [
        (CHAT, [USER, CALL, USER, RESULT]),
        (CHAT, [{"role": "system", "content": "s"}, RESULT, OTHER, USER]),
        (CHAT, [USER, {**RESULT, "tool_call_id": ""}]),
        (RESPONSES, [RESULT_ITEM, USER]),
        (MESSAGES, [USED, {"role": "assistant", "content": "a"}, USER]),
        (OLLAMA, [USER, {"role": "tool", "content": "r"}]),
        (OLLAMA, [USER, {"role": "tool", "content": "r", "tool_name": "f"}]),
    ],
)
async def test_a_cut_history_and_calls_without_ids_are_taken(client, path, conversation):
    response = await ask(client, path, conversation)
    assert response.status_code == 200, response.text


async def test_the_call_may_be_in_the_stored_turns(client):
    first = (await client.post(RESPONSES, json={"input": [USER, CALL_ITEM, RESULT_ITEM]})).json()
    body = {"input": [RESULT_ITEM], "previous_response_id": first["id"]}
    assert (await client.post(RESPONSES, json=body)).status_code == 200
