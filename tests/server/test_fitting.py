"""Conversations that the chat template does not take as they are, in every API."""

from __future__ import annotations

from itertools import pairwise

import pytest
from server.fakes import ByteTokenizer, RecordingTokenizer

from mlx_parallm.errors import InvalidRequestError

SENT = [("system", "a"), ("user", "q"), ("user", "r"), ("system", "b"), ("assistant", "x"), ("user", "s")]
FITTED = "s:a\nu:q\nr\nb\na:x\nu:s\na:"


def messages(roles=SENT):
    return [{"role": role, "content": text} for role, text in roles]


def developer(roles=SENT):
    return [{"role": role.replace("system", "developer"), "content": text} for role, text in roles]


FACES = {
    "chat": ("/v1/chat/completions", "messages", messages, {}),
    "chat with developer": ("/v1/chat/completions", "messages", developer, {}),
    "responses": ("/v1/responses", "input", developer, {}),
    "messages": ("/v1/messages", "messages", messages, {"max_tokens": 9}),
    "ollama": ("/api/chat", "messages", messages, {"model": "base", "stream": False}),
}


class InTurns(ByteTokenizer):
    """Its template begins with the user, after one system message, and then takes turns."""

    def apply_chat_template(self, messages, *args, **kwargs):
        roles = [message["role"] for message in messages]
        turns = roles[roles[0] == "system" :]
        if turns != (["user", "assistant"] * len(turns))[: len(turns)]:
            raise InvalidRequestError("roles must alternate", param="messages")
        return super().apply_chat_template(messages, *args, **kwargs)


class Recording(RecordingTokenizer):
    """Refuses two messages of the assistant in a row and a later system message."""

    def apply_chat_template(self, messages, *args, **kwargs):
        roles = [message["role"] for message in messages]
        if ("assistant", "assistant") in pairwise(roles) or "system" in roles[1:]:
            raise InvalidRequestError("two in a row", param="messages")
        return super().apply_chat_template(messages, *args, **kwargs)


class LeavesOut(ByteTokenizer):
    """Its template does not write a system message that comes later."""

    def apply_chat_template(self, messages, *args, **kwargs):
        written = [message for i, message in enumerate(messages) if i == 0 or message["role"] != "system"]
        return super().apply_chat_template(written, *args, **kwargs)


@pytest.fixture
def connect(make_client):
    return lambda tokenizer: make_client(tokenizer=tokenizer)


@pytest.mark.parametrize("tokenizer", [InTurns, LeavesOut])
@pytest.mark.parametrize("face", FACES)
async def test_the_messages_are_fitted(connect, engine, face, tokenizer):
    path, field, made, more = FACES[face]
    response = await connect(tokenizer()).post(path, json={field: made(), **more})
    assert response.status_code == 200, response.text
    two_in_a_row = tokenizer is LeavesOut and face != "messages"
    assert bytes(engine.requests[0].prompts[0]).decode() == (FITTED.replace("\nr", "\nu:r") if two_in_a_row else FITTED)


@pytest.mark.parametrize("face", FACES)
async def test_a_conversation_that_no_order_fits_is_refused_with_the_templates_reason(connect, engine, face):
    path, field, made, more = FACES[face]
    body = {field: made([("assistant", "x"), ("user", "q")]), **more}
    response = await connect(InTurns()).post(path, json=body)
    assert response.status_code == 400
    assert "roles must alternate" in response.text
    assert not engine.requests


async def test_what_the_template_takes_stays_as_it_is(connect, engine):
    await connect(ByteTokenizer()).post("/v1/chat/completions", json={"messages": messages()})
    assert bytes(engine.requests[0].prompts[0]).decode() == "s:a\nu:q\nu:r\ns:b\na:x\nu:s\na:"


@pytest.mark.parametrize("face", FACES)
async def test_a_later_system_message_leaves_the_beginning_of_the_prompt_as_it_was(connect, engine, face):
    """So the prefix cache has it. Claude Code sends such messages after some turns."""
    path, field, made, more = FACES[face]
    for roles in (SENT[:3], [*SENT[:3], ("assistant", "x"), ("system", "b")]):
        response = await connect(LeavesOut()).post(path, json={field: made(roles), **more})
        assert response.status_code == 200, response.text
    before, after = (bytes(request.prompts[0]).decode() for request in engine.requests)
    assert after == before + "x\nu:b\na:"


async def test_a_later_system_message_follows_the_results_of_tools(connect):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = [
        *messages([("user", "q")]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        *messages([("system", "b"), ("assistant", "x"), ("user", "r")]),
    ]
    tokenizer = Recording()
    await connect(tokenizer).post("/v1/chat/completions", json={"messages": said})
    texts = [message["content"] for message in tokenizer.given[0] if message["role"] == "tool"]
    assert texts == ["1\nb"]


async def test_names_and_calls_survive(connect, engine):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "q", "name": "one"},
        {"role": "user", "content": "r", "name": "other"},
    ]
    response = await connect(InTurns()).post("/v1/chat/completions", json={"messages": said})
    assert response.status_code == 400, "messages of two people are not made one"
    said = [
        *messages([("user", "q")]),
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "d"}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
    ]
    tokenizer = Recording()
    await connect(tokenizer).post("/v1/chat/completions", json={"messages": said})
    roles = [
        (message["role"], message["content"], len(message.get("tool_calls", ()))) for message in tokenizer.given[0]
    ]
    assert roles == [("user", "q", 0), ("assistant", "x", 2), ("tool", "1", 0), ("tool", "2", 0)]
