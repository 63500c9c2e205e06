"""Chat: from messages to the prompt, and the answer."""

import pytest
from server.asking import answered

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def chat(client, **body):
    return await answered(client, URL, {"messages": USER, **body})


async def test_the_whole_answer(client):
    got = await chat(client, metadata={"k": "v"})
    assert got.pop("id").startswith("chatcmpl-")
    assert got.pop("created") > 1.7e9
    message = {"role": "assistant", "content": "Hi ä!"}
    assert got == {
        "object": "chat.completion",
        "model": "tiny/byte-model",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 6,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "metadata": {"k": "v"},
    }


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (USER, "u:hi\na:"),
        ([{"role": "developer", "content": "d"}, *USER], "s:d\nu:hi\na:"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "u:a\nb\na:"),
        ([*USER, {"role": "assistant"}, *USER], "u:hi\na:\nu:hi\na:"),
        ([*USER, {"role": "assistant", "content": None, "refusal": "no"}, *USER], "u:hi\na:no\nu:hi\na:"),
        ([*USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "u:hi\na:no\na:"),
        ([{"role": "tool", "content": "4", "tool_call_id": ""}], "t:4\na:"),
    ],
)
async def test_messages_are_rendered_by_the_template(client, engine, messages, rendered):
    await chat(client, messages=messages)
    assert engine.prompt_text == rendered


async def test_template_options(client, engine):
    await chat(client, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
    assert engine.prompt_text == "u:hi\nenable_thinking=False\n"


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}]
)
async def test_max_tokens_and_its_newer_name(client, limit):
    (choice,) = (await chat(client, **limit))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi", "length")


async def test_logprobs_carry_exact_bytes(client, engine):
    engine.text = "ä"
    (choice,) = (await chat(client, logprobs=True, top_logprobs=1))["choices"]
    half = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    assert choice["logprobs"]["content"][0] == {**half, "top_logprobs": [half]}
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xC3], [0xA4]]


async def test_token_ids_and_prompt_logprobs_are_at_vllms_places(client):
    got = await chat(client, n=2, max_tokens=1, return_token_ids=True, prompt_logprobs=0)
    assert got["prompt_token_ids"] == list(b"u:hi\na:")
    assert [choice["token_ids"] for choice in got["choices"]] == [[72], [72]]
    assert got["prompt_logprobs"][0] is None
    assert got["prompt_logprobs"][1] == {"58": {"logprob": -0.5, "rank": 1, "decoded_token": ":"}}
