"""Completions: the request to the engine, and the answer."""

import math
from dataclasses import replace

from server.asking import answered
from server.fakes import ByteTokenizer

from mlx_parallm.core.requests import RepetitionLimits, SamplingParams, StopParams, TokenLogprob
from mlx_parallm.server.api.logprobs import prompt_logprobs, scored_prompt

URL = "/v1/completions"


async def complete(client, **body):
    return await answered(client, URL, {"prompt": "ab", **body})


async def test_the_whole_answer(client, engine):
    engine.cached_tokens = 1
    got = await complete(client, metadata={"k": "v"})
    assert got.pop("id").startswith("cmpl-")
    assert got.pop("created") > 1.7e9
    assert got == {
        "object": "text_completion",
        "model": "tiny/byte-model",
        "choices": [{"index": 0, "text": "Hi ä!", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "metadata": {"k": "v"},
    }


async def test_defaults_are_openais_and_seeds_are_fresh(client, engine):
    for top_k in (0, -1):
        await complete(client, top_k=top_k)
    first, second = (request.sampling for request in engine.requests)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64
    assert first == SamplingParams(seed=first.seed)
    assert engine.requests[0].stopping == StopParams(16, repetition=RepetitionLimits())


async def test_the_sampled_token_is_reported_beside_more_likely_ones(client, engine):
    engine._output = drawing(engine, TokenLogprob(72, -4.0, ((65, -0.1), (66, -0.2))))
    logprobs = (await complete(client, max_tokens=1, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"A": -0.1, "B": -0.2, "H": -4.0}]
    assert logprobs["token_logprobs"] == [-4.0]


async def test_minus_infinity_is_valid_json(client, engine):
    engine._output = drawing(engine, TokenLogprob(72, -math.inf, ((65, -math.inf),)))
    response = await client.post(URL, json={"prompt": "a", "max_tokens": 1, "logprobs": 1})
    assert "Infinity" not in response.text
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def drawing(engine, logprob):
    """A replacement for the fake engine's outputs: always this token."""
    forward = engine._output

    def output(request, index, token, text, last):
        return replace(forward(request, index, token, text, last), logprobs=(logprob,))

    return output


def test_candidates_of_a_prompt_token_have_ranks_and_its_own_is_first():
    scored = scored_prompt([0, 97], [None, TokenLogprob(97, -7.0, ((98, -1.0), (99, -1.0), (100, -2.0)), rank=40)])
    (_, candidates) = prompt_logprobs(ByteTokenizer(), scored, 3)
    assert [(token, each.rank) for token, each in candidates.items()] == [("97", 40), ("98", 1), ("99", 1), ("100", 3)]
