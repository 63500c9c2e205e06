"""Completions: the request to the engine, and the answer."""

import math
from dataclasses import replace

import pytest
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


async def test_every_option_reaches_the_engine(client, engine):
    await complete(
        client,
        n=2,
        max_tokens=7,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-1,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "3": 2.5},
        logprobs=2,
        ignore_eos=True,
        priority=-3,
    )
    request = engine.requests[0]
    assert request.sampling == SamplingParams(
        0.5, 40, 0.9, 0.1, 2**64 - 1, 1.0, -1.0, 1.2, ((3, 2.5), (5, -100.0)), top_logprobs=2
    )
    assert request.stopping == StopParams(7, 3, ("a", "b"), ignore_eos=True)
    assert (request.prompts, request.n, request.priority, request.prompt_logprobs) == (((97, 98),), 2, -3, None)


async def test_defaults_are_openais_and_seeds_are_fresh(client, engine):
    for top_k in (0, -1):
        await complete(client, top_k=top_k)
    first, second = (request.sampling for request in engine.requests)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64
    assert first == SamplingParams(seed=first.seed)
    assert engine.requests[0].stopping == StopParams(16, repetition=RepetitionLimits())


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ä", [(195, 164)]),
        (["a", "b"], [(97,), (98,)]),
        ([7, 8], [(7, 8)]),
        ([[7], [8, 9]], [(7,), (8, 9)]),
    ],
)
async def test_prompt_forms(client, engine, prompt, ids):
    got = await complete(client, prompt=prompt)
    assert list(engine.requests[0].prompts) == ids
    assert [choice["index"] for choice in got["choices"]] == list(range(len(ids)))


async def test_lm_eval_scores_token_prompts(client, engine):
    """Its request, and what it reads: as many tokens as ids sent, then exactly one drawn."""
    got = await complete(
        client, prompt=[[104, 105], [106]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    assert engine.requests[0].prompt_logprobs == 1
    first, second = got["choices"]
    assert first["text"] == "hiH"
    assert first["logprobs"] == {
        "tokens": ["h", "i", "H"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {"H": -0.5}],
        "text_offset": [0, 1, 2],
        "token_ids": [104, 105, ord("H")],
    }
    assert second["logprobs"]["tokens"] == ["j", "H"]


async def test_max_tokens_0_scores_and_generates_nothing(client):
    got = await complete(client, prompt="abc", max_tokens=0, echo=True, logprobs=0)
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert got["usage"]["completion_tokens"] == 0


async def test_the_sampled_token_is_reported_beside_more_likely_ones(client, engine):
    engine._output = drawing(engine, TokenLogprob(72, -4.0, ((65, -0.1), (66, -0.2))))
    logprobs = (await complete(client, max_tokens=1, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"A": -0.1, "B": -0.2, "H": -4.0}]
    assert logprobs["token_logprobs"] == [-4.0]


async def test_of_tokens_with_equal_texts_the_more_likely_is_reported(client, engine):
    """Two halves of characters are both U+FFFD alone."""
    engine._output = drawing(engine, TokenLogprob(0xC3, -0.7, ((0xA4, -0.1), (0xC3, -0.7))))
    logprobs = (await complete(client, max_tokens=1, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.1}]


async def test_minus_infinity_is_valid_json(client, engine):
    engine._output = drawing(engine, TokenLogprob(72, -math.inf, ((65, -math.inf),)))
    response = await client.post(URL, json={"prompt": "a", "max_tokens": 1, "logprobs": 1})
    assert "Infinity" not in response.text
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_text_offsets_follow_characters_not_bytes(client, engine):
    engine.text = "ä!"
    logprobs = (await complete(client, prompt="é", echo=True, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["\ufffd", "\ufffd", "\ufffd", "\ufffd", "!"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2]


async def test_prompt_logprobs_and_token_ids(client, engine):
    got = await complete(client, prompt=["ab", "c"], max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    first, second = got["choices"]
    assert first["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert second["prompt_logprobs"] == [None]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([97, 98], [72])
    assert first["logprobs"] is None


async def test_prompt_logprobs_and_echo_may_ask_for_different_numbers(client, engine):
    got = await complete(client, max_tokens=1, echo=True, logprobs=0, prompt_logprobs=2)
    assert engine.requests[0].prompt_logprobs == 2
    (choice,) = got["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.5}
    assert len(choice["prompt_logprobs"][1]) == 2


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
