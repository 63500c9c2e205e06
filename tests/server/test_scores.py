"""`/v1/score` and `/v1/rerank` over fakes: the engine's logprobs are known, and a reward model gives a row's length."""

import pytest
from server.asking import answered as ask
from server.asking import fault, refusal

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import PromptScored, TokenLogprob

SCORE, RERANK = "/v1/score", "/v1/rerank"
PAIR = {"text_1": "ab", "text_2": ["c", "de"]}
SEARCH = {"query": "q", "documents": ["one", {"text": "two"}, "three"]}
USAGE = {"completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture
def likely(engine):
    """Gives each token of prompt k the logprob -k - its place / 100."""

    def events(request):
        for number, prompt in enumerate(request.prompts):
            logprobs = (TokenLogprob(token, -number - place / 100) for place, token in enumerate(prompt) if place)
            yield PromptScored(number, (None, *logprobs))
        yield engine._finished(request, 0)

    engine._events = events


@pytest.mark.parametrize("url", [SCORE, "/score"])
async def test_a_score_is_the_mean_logprob_of_the_second_text(client, engine, likely, url):
    answer = await ask(client, url, PAIR)
    (request,) = engine.requests
    assert request.prompts == ((97, 98, 99), (97, 98, 100, 101))
    assert (request.stopping.max_tokens, request.prompt_logprobs, request.scored_from) == (0, 0, 2)
    assert request.adapter == BASE_ADAPTER
    created = answer.pop("created")
    assert created > 0
    scores = [item.pop("score") for item in answer["data"]]
    assert scores == pytest.approx([-0.02, -1.025])
    assert answer == {
        "id": request.request_id,
        "object": "list",
        "model": "tiny/byte-model",
        "data": [{"object": "score", "index": 0, "tokens": 1}, {"object": "score", "index": 1, "tokens": 2}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7, **USAGE},
    }


async def test_texts_are_paired_one_to_one_or_one_to_all(client, engine):
    await ask(client, SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]})
    await ask(client, SCORE, {"text_1": "a", "text_2": "c"})
    assert [request.prompts for request in engine.requests] == [((97, 99), (98, 100)), ((97, 99),)]


@pytest.mark.parametrize("url", [RERANK, "/rerank"])
async def test_documents_come_back_best_first(client, engine, url):
    def events(request):
        for number, prompt in enumerate(request.prompts):
            worth = {0: -3.0, 1: -1.0, 2: -3.0}[number]
            yield PromptScored(number, (None, *(TokenLogprob(token, worth) for token in prompt[1:])))
        yield engine._finished(request, 0)

    engine._events = events
    answer = await ask(client, url, {**SEARCH, "return_documents": True})
    assert [(each["index"], each["relevance_score"], each["document"]["text"]) for each in answer["results"]] == [
        (1, -1.0, "two"),
        (0, -3.0, "one"),
        (2, -3.0, "three"),
    ]
    prompts = [bytes(prompt).decode() for prompt in engine.requests[0].prompts]
    assert prompts[0] == "Passage: one\nQuestion: q"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    best = await ask(client, url, {**SEARCH, "top_n": 1, "return_documents": False})
    assert best["results"] == [{"index": 1, "relevance_score": -1.0}]


async def test_only_the_text_that_is_not_scored_is_cut(client, engine):
    await ask(client, SCORE, {"text_1": "0123456789", "text_2": "ab", "truncate_prompt_tokens": 5})
    await ask(client, RERANK, {"query": "q" * 20, "documents": ["x" * 100], "truncate_prompt_tokens": -1})
    first, second = (bytes(request.prompts[0]).decode() for request in engine.requests)
    assert first == "012ab"
    assert second.endswith(" " + "q" * 20)
    assert len(second) == 64


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": "", "text_2": "b"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": [1]}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b" * 64}, "text_2"),
        (SCORE, {"text_1": "a" * 63, "text_2": "bb"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": "bbb", "truncate_prompt_tokens": 3}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        (SCORE, {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
        (SCORE, {"text_1": "a", "text_2": "b", "model": "nobody"}, "model"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
async def test_a_bad_field_is_named(client, engine, url, body, param):
    response = await client.post(url, json=body)
    assert response.status_code in (400, 404), response.text
    assert fault(response)["param"].partition(".")[0].partition("[")[0] == param
    assert not engine.requests


async def test_a_reward_model_judges_answers(client, engine, reward_models):
    answer = await ask(client, SCORE, {**PAIR, "model": "reward_model:polite"})
    ((name, rows),) = reward_models.asked
    assert (name, [bytes(row).decode() for row in rows]) == ("polite", ["u:ab\na:c", "u:ab\na:de"])
    assert [item["score"] for item in answer["data"]] == [8.0, 9.0]
    assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("reward_model:polite", 17)
    ranking = await ask(client, RERANK, {**SEARCH, "model": "reward_model:polite"})
    assert [each["index"] for each in ranking["results"]] == [2, 0, 1]
    assert bytes(reward_models.asked[1][1][0]).decode() == "u:q\na:one"
    assert not engine.requests
    assert client.app.state.services.gate.held == 0


async def test_many_documents_are_scored_in_parts(client, engine, reward_models, likely):
    """The fake's logprobs begin anew with each part."""
    documents = [f"{number:03d}" for number in range(300)]
    answer = await ask(client, RERANK, {"query": "q", "documents": documents})
    assert [len(request.prompts) for request in engine.requests] == [128, 128, 44]
    assert [each["index"] for each in answer["results"][:6]] == [0, 128, 256, 1, 129, 257]
    assert answer["usage"]["prompt_tokens"] == 300 * len("Passage: 000\nQuestion: q")
    scores = await ask(client, SCORE, {"text_1": "a", "text_2": ["b", "cd"] * 100, "model": "reward_model:polite"})
    assert [len(rows) for _, rows in reward_models.asked] == [128, 72]
    assert [item["score"] for item in scores["data"][126:130]] == [7.0, 8.0, 7.0, 8.0]


async def test_a_reward_model_cuts_nothing(client):
    for more, param in [({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"text_1": "x" * 70}, None)]:
        await refusal(client.post(SCORE, json={**PAIR, "model": "reward_model:polite", **more}), 400, param=param)


@pytest.mark.parametrize("training", [None])
async def test_there_are_no_reward_models(client):
    response = await client.post(SCORE, json={**PAIR, "model": "reward_model:polite"})
    assert (response.status_code, fault(response)["code"]) == (409, "training_disabled")
