"""How many candidates a request may have at each token: the operator's limit, and the largest answer."""

from __future__ import annotations

import json

import pytest
from server.fakes import CARD

from mlx_parallm.config import ServerConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "completions": (COMPLETIONS, {"prompt": "abc"}, "logprobs"),
    "chat": (CHAT, {"messages": MESSAGES, "logprobs": True}, "top_logprobs"),
    "chat by a number": (CHAT, {"messages": MESSAGES}, "logprobs"),
    "prompt": (COMPLETIONS, {"prompt": "abc"}, "prompt_logprobs"),
    "tokens": ("/inference/v1/generate", {"token_ids": [1, 2]}, "logprobs"),
    "vLLM": ("/generate", {"prompt": {"prompt_token_ids": [97]}}, "logprobs"),
}


def asking(name, number):
    """The path and the body of a request for so many candidates of one token, and the field that says so."""
    path, body, field = BODIES[name]
    if name == "tokens":
        return path, {**body, "sampling_params": {"max_tokens": 1, field: number}}, f"sampling_params.{field}"
    return path, {**body, "max_tokens": 1, field: number}, field


@pytest.mark.parametrize("name", BODIES)
async def test_more_than_the_operator_allows_are_refused_with_the_flag(client, fault, engine, name):
    path, body, field = asking(name, 21)
    error = fault(await client.post(path, json=body))
    assert error["param"] == field
    assert "--max-logprobs" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("name", BODIES)
async def test_more_where_the_operator_allows_them(make_client, engine, name):
    path, body, _ = asking(name, 1024)
    response = await make_client(max_logprobs=1024).post(path, json=body)
    assert response.status_code == 200
    (request,) = engine.requests
    number = request.prompt_logprobs if name == "prompt" else request.sampling.top_logprobs
    assert number == CARD.vocab_size, "there are no more"
    assert json.dumps(response.json()).count("-") > 20, "the answer has them"


@pytest.mark.parametrize("name", BODIES)
async def test_there_is_no_number_for_the_whole_vocabulary(make_client, fault, engine, name):
    path, body, field = asking(name, -1)
    response = await make_client(max_logprobs=1024).post(path, json=body)
    assert (response.status_code, fault(response)["param"]) == (400, field)
    assert not engine.requests


@pytest.mark.parametrize("limit", [-1, 1025])
def test_the_operators_limit_is_a_number_that_json_can_carry(limit):
    with pytest.raises(ValueError, match="max_logprobs"):
        ServerConfig(max_logprobs=limit)


async def test_a_smaller_limit_counts_too(make_client, fault):
    client = make_client(max_logprobs=2)
    path, body, field = asking("completions", 3)
    assert fault(await client.post(path, json=body))["param"] == field
    assert (await client.post(path, json=body | {field: 2})).status_code == 200


async def test_the_operator_may_allow_more_of_the_prompt(make_client):
    path, body, _ = asking("prompt", 100)
    got = await make_client(max_logprobs=100).post(path, json=body)
    assert [len(each or ()) for each in got.json()["choices"][0]["prompt_logprobs"]] == [0, 100, 100]


async def test_echo_asks_for_the_larger_of_two_numbers(make_client, engine):
    body = {"prompt": "abc", "echo": True, "max_tokens": 1, "logprobs": 1000, "prompt_logprobs": 30}
    await make_client(max_logprobs=1000).post(COMPLETIONS, json=body)
    assert engine.requests[0].prompt_logprobs == CARD.vocab_size


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[97] * 10] * 4, "max_tokens": 1, "prompt_logprobs": 30}, "prompt_logprobs"),
        ({"prompt": "a", "max_tokens": 10, "n": 4, "logprobs": 30}, "logprobs"),
        ({"prompt": ["a", "b"], "max_tokens": 20, "logprobs": 30}, "logprobs"),
    ],
)
async def test_an_answer_with_too_many_is_refused(make_client, fault, engine, monkeypatch, fields, param):
    monkeypatch.setattr("mlx_parallm.server.request.MAX_CANDIDATES", 1000)
    error = fault(await make_client(max_logprobs=1000).post(COMPLETIONS, json=fields))
    assert error["param"] == param
    assert "more than 1000 in all" in error["message"]
    assert not engine.requests


async def test_a_stream_has_them_too_but_not_of_the_prompt(make_client, fault):
    client = make_client(max_logprobs=100)
    body = {"prompt": "a", "max_tokens": 1, "stream": True, "logprobs": 100}
    lines = (await client.post(COMPLETIONS, json=body)).text.splitlines()
    (choice,) = json.loads(lines[0].removeprefix("data: "))["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) > 20
    error = fault(await client.post(COMPLETIONS, json=body | {"prompt_logprobs": 100}))
    assert error["param"] == "prompt_logprobs"
