"""`return_tokens_as_token_ids`: tokens in logprobs are written as `token_id:<id>`."""

import pytest

COMPLETION = {"prompt": "x", "max_tokens": 2, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
AS_IDS = {"return_tokens_as_token_ids": True}
H, I = b"Hi"  # noqa: E741


def name(token_id):
    return f"token_id:{token_id}"


async def test_completions(client, engine):
    engine.text = "Hi"
    said = (await client.post("/v1/completions", json={**COMPLETION, **AS_IDS})).json()["choices"][0]
    assert said["text"] == "Hi"
    assert said["logprobs"]["tokens"] == [name(H), name(I)]
    assert said["logprobs"]["top_logprobs"] == [
        {name(H): -0.5, name(H + 1): -1.5},
        {name(I): -0.5, name(I + 1): -1.5},
    ]
    assert said["logprobs"]["text_offset"] == [0, 1]
    plain = (await client.post("/v1/completions", json=COMPLETION)).json()["choices"][0]
    assert plain["logprobs"]["tokens"] == ["H", "i"]


async def test_an_echoed_prompt_too(client, engine):
    body = {"prompt": [120, 195], "max_tokens": 0, "echo": True, "logprobs": 0, **AS_IDS}
    said = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert said["tokens"] == [name(120), name(195)], "parts of a character have no text of their own"
    assert said["top_logprobs"] == [None, {name(195): -0.5}]


async def test_chat_keeps_the_bytes(client, engine):
    engine.text = "Hi"
    said = (await client.post("/v1/chat/completions", json={**CHAT, **AS_IDS})).json()["choices"][0]
    assert said["message"]["content"] == "Hi"
    first = said["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == (name(H), [H])
    assert [(top["token"], top["bytes"]) for top in first["top_logprobs"]] == [(name(H), [H]), (name(H + 1), [H + 1])]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_streams_say_the_same(client, engine, path, body):
    engine.text = "Hi"
    streamed = (await client.post(path, json={**body, **AS_IDS, "stream": True})).text
    assert f'"{name(H)}"' in streamed
    assert f'"{name(I)}"' in streamed


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_other_values_are_refused(client, fault, path, body):
    response = await client.post(path, json={**body, "return_tokens_as_token_ids": "yes"})
    assert (response.status_code, fault(response)["param"]) == (400, "return_tokens_as_token_ids")
