"""Chat: from messages to the prompt, and the answer."""

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
