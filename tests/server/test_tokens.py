"""Token-in, token-out: `/inference/v1/generate`, chats with the tokens of their prompts, and `/render`."""

import json
from dataclasses import replace

import pytest
from server.asking import answered, refusal
from server.fakes import EOS

from mlx_parallm.core.requests import FinishReason

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
H, I = b"Hi"  # noqa: E741


async def generate(client, headers=None, **body):
    return await answered(client, GENERATE, {"token_ids": [97, 98], **body}, headers=headers)


async def refused(client, path=GENERATE, **body):
    base = {"token_ids": [97]} if path == GENERATE else {"messages": MESSAGES}
    return await refusal(client.post(path, json={**base, **body}), 400)


async def test_a_stream_has_the_tokens_as_they_come(client, engine):
    engine.text = "Hi"
    body = {"token_ids": [97], "stream": True, "return_token_ids": True, "sampling_params": {"logprobs": 0}}
    lines = (await client.post(GENERATE, json=body)).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    first, second = (json.loads(line.removeprefix("data: ")) for line in lines[:-2])
    assert (first["prompt_token_ids"], "prompt_token_ids" in second) == ([97], False)
    choices = [chunk["choices"][0] for chunk in (first, second)]
    assert [(choice["token_ids"], choice["finish_reason"]) for choice in choices] == [([H], None), ([I], "stop")]
    assert choices[0]["logprobs"]["content"][0]["token"] == f"token_id:{H}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [97, 999]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": "2"}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 2**31}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logits_processors": ["x"]}}, "sampling_params.logits_processors"),
        ({"collect_trajectory": True, "sampling_params": {"top_p": 0.5}}, "sampling_params.top_p"),
        ({"collect_trajectory": True, "sampling_params": {"unheard_of": 1}}, "sampling_params.unheard_of"),
    ],
    ids=str,
)
async def test_errors_name_the_field_where_the_client_has_it(client, engine, fields, param):
    error = await refused(client, **fields)
    assert error["param"] == param
    assert not engine.requests


# ---- chats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"prompt_token_ids": [5, 6]}), (f"{CHAT}/tokens", {"tokens": [5, 6]})], ids=str
)
async def test_the_tokens_of_a_chats_prompt_are_used_as_they_are(client, engine, path, fields):
    body = {"messages": MESSAGES, "max_tokens": 3, "return_token_ids": True, **fields}
    got = (await client.post(path, json=body)).json()
    assert engine.requests[0].prompts == ((5, 6),)
    assert got["prompt_token_ids"] == [5, 6]
    assert got["choices"][0]["message"]["content"] == "Hi "


async def test_a_rendered_chat_is_a_request_for_tokens(client, engine):
    body = {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "stop": ["a"], "seed": 3, "logit_bias": {"7": 1}}
    rendered = (await client.post(f"{CHAT}/render", json={**body, "model": "base"})).json()
    assert not engine.requests, "nothing is generated"
    assert bytes(rendered["token_ids"]) == b"u:x\na:"
    assert rendered["sampling_params"] == {
        "seed": 3,
        "stop": ["a"],
        "logit_bias": {"7": 1.0},
        "max_tokens": 4,
        "logprobs": 0,
    }
    answer = await generate(client, **rendered)
    await client.post(CHAT, json=body)
    asked, chatted = engine.requests
    assert (asked.prompts, asked.sampling) == (chatted.prompts, chatted.sampling)
    assert asked.stopping == replace(chatted.stopping, repetition=None)
    assert bytes(answer["choices"][0]["token_ids"]) == b"Hi \xc3"


async def test_what_tokens_cannot_say_is_not_rendered(client):
    error = await refused(client, path=f"{CHAT}/render", response_format={"type": "json_object"})
    assert error["param"] == "response_format"
    error = await refused(client, path=f"{CHAT}/render", max_thinking_tokens=9)
    assert error["param"] == "max_thinking_tokens"
    await refusal(client.post(f"{CHAT}/render", json={"messages": MESSAGES, "model": "nobody"}), 404, param="model")


# ---- fields of completions and chat --------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": MESSAGES})])
async def test_stop_tokens_and_special_tokens(client, engine, path, body):
    engine.stop_reason = 5
    fields = {"stop_token_ids": [5], "skip_special_tokens": False}
    (choice,) = (await client.post(path, json=body | fields)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (FinishReason.STOP, 5)
    assert engine.requests[0].stopping.stop_token_ids == (5,)
    assert engine.requests[0].visible_specials == {256, EOS}
    await client.post(path, json=body)
    assert (engine.requests[1].stopping.stop_token_ids, engine.requests[1].visible_specials) == ((), frozenset())


async def test_a_grammar_decides_alone_where_the_text_ends(client):
    fields = {"response_format": {"type": "json_object"}, "stop_token_ids": [5]}
    assert (await refused(client, path=CHAT, **fields))["param"] == "stop_token_ids"


async def test_the_operator_may_make_token_ids_the_default(make_client):
    client = make_client(return_tokens_as_token_ids=True)
    for asked, first in (({}, f"token_id:{H}"), ({"return_tokens_as_token_ids": False}, "H")):
        body = {"prompt": "x", "max_tokens": 1, "logprobs": 0, **asked}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [first]
        body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, **asked}
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
        assert choice["logprobs"]["content"][0]["token"] == first


async def test_the_operator_chooses_whose_logprobs_are_reported(make_client, engine):
    for mode in ("raw_logprobs", "processed_logprobs"):
        await make_client(logprobs_mode=mode).post("/v1/completions", json={"prompt": "x", "logprobs": 0})
    assert [request.sampling.processed_logprobs for request in engine.requests] == [False, True]


async def test_tokens_have_their_strings(client):
    got = (await client.post("/tokenize", json={"prompt": "ä", "return_token_strs": True})).json()
    assert got["token_strs"] == ["0xc3", "0xa4"]


async def test_two_prompts_of_one_chat_must_agree(client):
    error = await refused(client, path=f"{CHAT}/tokens", tokens=[5], prompt_token_ids=[6])
    assert error["param"] == "prompt_token_ids"
