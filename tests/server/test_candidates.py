"""How many candidates a request may have at each token: the operator's limit, and the largest answer."""

from __future__ import annotations

import json

import pytest
from server.asking import fault
from server.fakes import CARD

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
@pytest.mark.parametrize(("limit", "number"), [(20, 21), (2, 3), (1024, -1)])
async def test_more_than_the_operator_allows_are_refused_with_the_flag(make_client, engine, name, limit, number):
    path, body, field = asking(name, number)
    error = fault(await make_client(max_logprobs=limit).post(path, json=body))
    assert error["param"] == field
    assert "--max-logprobs" in error["message"] or number < 0
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[97] * 10] * 4, "max_tokens": 1, "prompt_logprobs": 30}, "prompt_logprobs"),
        ({"prompt": "a", "max_tokens": 10, "n": 4, "logprobs": 30}, "logprobs"),
        ({"prompt": ["a", "b"], "max_tokens": 20, "logprobs": 30}, "logprobs"),
    ],
)
async def test_an_answer_with_too_many_is_refused(make_client, engine, monkeypatch, fields, param):
    monkeypatch.setattr("mlx_parallm.server.request.MAX_CANDIDATES", 1000)
    error = fault(await make_client(max_logprobs=1000).post(COMPLETIONS, json=fields))
    assert error["param"] == param
    assert "more than 1000 in all" in error["message"]
    assert not engine.requests
