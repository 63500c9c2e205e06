"""`return_tokens_as_token_ids`: tokens in logprobs are written as `token_id:<id>`."""

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


async def test_chat_keeps_the_bytes(client, engine):
    engine.text = "Hi"
    said = (await client.post("/v1/chat/completions", json={**CHAT, **AS_IDS})).json()["choices"][0]
    assert said["message"]["content"] == "Hi"
    first = said["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == (name(H), [H])
    assert [(top["token"], top["bytes"]) for top in first["top_logprobs"]] == [(name(H), [H]), (name(H + 1), [H + 1])]
