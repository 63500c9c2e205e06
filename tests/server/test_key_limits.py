"""The limits and the usage of each key."""

import asyncio
from contextlib import ExitStack, suppress

import pytest
from server.asking import fault, refusal
from server.keys import key_file

from mlx_parallm.errors import OverloadedError
from mlx_parallm.server.access import KeyRing, Role, new_key, write_keys
from mlx_parallm.server.limits import Accounts, SequenceGate

BODY = {"prompt": "abcde", "max_tokens": 3}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def account(tmp_path, clock):
    """`account(**limits)` → the account of a key with these limits."""

    def make(**limits):
        key, _ = new_key("app", Role.INFERENCE, **limits)
        write_keys(tmp_path / "keys.json", [key])
        return Accounts(KeyRing(file=tmp_path / "keys.json"), clock).of(key)

    return make


def begin(account):
    with account.request():
        pass


def test_requests_per_minute(account, clock):
    app = account(requests_per_minute=6)
    for _ in range(6):
        begin(app)
    with pytest.raises(OverloadedError, match="6 requests a minute; try again in 10 s") as raised:
        begin(app)
    assert raised.value.retry_after_s == 10
    clock.now = 10.0
    begin(app)
    clock.now = 1000.0
    assert app.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "0.000s",
    }
    assert (app.requests, app.refused) == (7, 1)


def test_tokens_per_minute_may_be_owed_and_are_then_waited_for(account, clock):
    app = account(tokens_per_minute=60)
    app.add_prompt(50)
    begin(app)
    app.add_completion(30)
    assert app.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert app.headers()["x-ratelimit-reset-tokens"] == "80.000s"
    with pytest.raises(OverloadedError, match="60 tokens a minute; try again in 21 s"):
        begin(app)
    clock.now = 21.0
    begin(app)


async def test_headers_and_refusals_over_http(make_client, tmp_path):
    limits = {"requests_per_minute": 2, "tokens_per_minute": 1000}
    file, sent = key_file(tmp_path, app=("inference", limits), other="inference", boss="admin")
    client = make_client(keys_file=file)
    answers = [
        await client.post("/v1/completions", json={**BODY, "stream": stream}, headers=sent["app"])
        for stream in (False, True, False)
    ]
    shown = [
        {name: answer.headers[f"x-ratelimit-remaining-{name}"] for name in ("requests", "tokens")} for answer in answers
    ]
    assert shown[0] == {"requests": "1", "tokens": "992"}
    assert (shown[2]["requests"], fault(answers[2])["code"]) == ("0", "rate_limit_exceeded")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    answer = await client.post("/v1/completions", json=BODY, headers=sent["other"])
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert (await client.get("/v1/models", headers=sent["app"])).status_code == 200, "only answers are limited"
    text = (await client.get("/metrics", headers=sent["boss"])).text
    for name, value in (("requests", 2), ("requests_refused", 1), ("prompt_tokens", 10), ("generation_tokens", 6)):
        assert f'mlx_parallm_key_{name}_total{{key="app"}} {value}.0' in text


ANSWERS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 4, "messages": USER},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "x"},
    "/api/embed": {"input": ["x"]},
    "/api/embeddings": {"prompt": "x"},
}


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_the_limits_of_a_key_count_on_every_route_that_answers(make_client, tmp_path, engine, limit):
    limits = {path: (f"key-{number}", {limit: 1}) for number, path in enumerate(ANSWERS)}
    file, sent = key_file(tmp_path, **{name: ("inference", each) for name, each in limits.values()})
    client = make_client(keys_file=file, ollama_api=True)
    for path, body in ANSWERS.items():
        headers = sent[limits[path][0]]
        statuses = [(await client.post(path, json=body, headers=headers)).status_code for _ in range(2)]
        assert statuses == [200, 429], path
    served = len(engine.requests)
    for path, (name, _) in limits.items():
        other = next(each for each in ANSWERS if each != path)
        assert (await client.post(other, json=ANSWERS[other], headers=sent[name])).status_code == 429
    assert len(engine.requests) == served, "one limit for all routes"


async def test_requests_under_way_at_a_time(make_client, tmp_path, engine):
    file, sent = key_file(tmp_path, app=("inference", {"max_concurrent": 1}))
    client = make_client(keys_file=file)
    engine.pause_before = 1
    first = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=sent["app"]))
    await engine.paused.wait()
    refused = await client.post("/v1/completions", json=BODY, headers=sent["app"])
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert "1 requests under way" in fault(refused)["message"]
    engine.go_on.set()
    assert (await first).status_code == 200
    assert (await client.post("/v1/completions", json=BODY, headers=sent["app"])).status_code == 200


def test_keys_that_flood_the_queue_leave_places_for_the_next():
    gate = SequenceGate(640)
    with ExitStack() as held:

        def fill(key):
            before = gate.held
            with suppress(OverloadedError):
                while True:
                    held.enter_context(gate.reserve(1, key))
            return gate.held - before

        assert fill("one") >= 500
        assert fill("two") > 50
        assert all(fill(f"key-{number}") > 0 for number in range(3))
    with gate.reserve(640):
        assert gate.held == gate.limit, "the one key of a server may hold all"


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/score", {"model": "reward_model:polite", "text_1": "ab", "text_2": "cd"}, None),
        ("/v1/rerank", {"model": "reward_model:polite", "query": "ab", "documents": ["cd", "ef"]}, None),
        ("/v1/embeddings", {"input": "abcd"}, 4),
        ("/v1/completions", {"prompt": "abcd", "max_tokens": 0, "echo": True, "logprobs": 0}, 4),
        ("/v1/training/update", {"trajectories": [{"prompt": "ab", "output": "cd", "reward": 1.0}] * 2}, 8),
    ],
)
async def test_what_computes_is_charged(make_client, tmp_path, path, body, tokens):
    file, sent = key_file(tmp_path, app=("train", {"tokens_per_minute": 1}))
    client = make_client(keys_file=file)
    answer = await client.post(path, json=body, headers=sent["app"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
    (usage,) = (await client.get("/v1/usage", headers=sent["app"])).json()["data"]
    computed = answer.json()["usage"]["prompt_tokens"] if tokens is None else tokens
    assert (usage["requests"], usage["prompt_tokens"]) == (1, computed)
    await refusal(client.post(path, json=body, headers=sent["app"]), 429, code="rate_limit_exceeded")
