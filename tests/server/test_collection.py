"""Requests with `collect_trajectory`: the request to the engine, the answer, and what is refused."""

import asyncio
import json
from dataclasses import replace

import pytest
from server.asking import refusal

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import CollectionSpec, WorkClass
from mlx_parallm.errors import ConflictError, InvalidRequestError, TrainingDisabledError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
MARKED = {"collect_trajectory": True, "scoring_function": "exact", "metadata": {"answer": "4"}}
DONE = "data: [DONE]\n\n"


async def post(client, path, **fields):
    return await client.post(path, json=BODIES[path] | fields)


async def refused(client, path, status=400, **fields):
    return await refusal(post(client, path, **fields), status)


async def transcript(client, path, **fields):
    """The raw stream, with this run's id and time written as ID and 0."""
    text = (await post(client, path, stream=True, **fields)).text
    first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    return text.replace(first["id"], "ID").replace(f'"created":{first["created"]}', '"created":0')


@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_collects_and_the_answer_has_the_trajectory_ids(client, engine, training, path):
    metadata = {"answer": 4, "entry": {"steps": [1, 2.5, None, True], "é": "ü"}}
    response = await post(client, path, n=2, collect_trajectory=True, scoring_function="exact", metadata=metadata)
    collection = CollectionSpec("exact", metadata)
    messages = ({"role": "user", "content": "x"},) if path == CHAT else ()
    assert [request.collection for request in engine.requests] == [replace(collection, messages=messages)]
    assert [request.collection.client for request in engine.requests] == ["127.0.0.1"]
    assert training.checked == [(collection, BASE_ADAPTER)]
    assert training.collected == engine.requests
    assert response.json()["trajectory_ids"] == ["traj-0", "traj-1"]
    assert "metadata" not in response.json()


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
async def test_collected_requests_use_the_share_of_rollouts_and_others_that_of_live_requests(engine, make_client, path):
    body = BODIES.get(path, {"input": "x"})
    for settings, fields, wanted in (
        ({}, {}, WorkClass.INFERENCE),
        ({}, {"collect_trajectory": True}, WorkClass.TRAINING),
        ({}, {"collect_trajectory": True, "traffic_class": "live"}, WorkClass.INFERENCE),
        ({}, {"traffic_class": "rollout"}, WorkClass.TRAINING),
        ({"collected_traffic_class": "live"}, {"collect_trajectory": True}, WorkClass.INFERENCE),
        ({"collected_traffic_class": "live"}, {"traffic_class": "rollout"}, WorkClass.TRAINING),
    ):
        async with make_client(**settings) as client:
            response = await client.post(path, json=body | fields)
        assert response.status_code == 200, response.text
        assert engine.requests[-1].work_class is wanted, (settings, fields)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{}, {"collect_trajectory": False}, {"collect_trajectory": None}, {"metadata": {}}])
async def test_an_unmarked_request_is_not_collected(client, engine, training, path, fields):
    response = await post(client, path, **fields)
    assert engine.requests[0].collection is None
    assert not training.checked
    assert not training.collected
    assert "trajectory_ids" not in response.json()


async def test_the_sampling_version_is_checked(client, adapters, training):
    adapters.publish("policy")
    adapters.publish("policy")
    await post(client, COMPLETIONS, model="policy", **MARKED)
    assert training.checked == [(CollectionSpec("exact", {"answer": "4"}), AdapterRef("policy", 2))]
    assert adapters.leased == 0


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (COMPLETIONS, {"prompt": "2 + 2 ="}, "2 + 2 ="),
        (COMPLETIONS, {"prompt": ["2 + 2 ="]}, "2 + 2 ="),
        (COMPLETIONS, {"prompt": ["2 + 2 =", "3 + 3 ="]}, None),
        (COMPLETIONS, {"prompt": [50, 32]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2 ="}]}]}, "2 + 2 ="),
        (CHAT, {"messages": [{"role": role, "content": role} for role in ("user", "system", "assistant")]}, "user"),
        (CHAT, {"messages": [{"role": "user", "content": text} for text in ("first", "last")]}, "last"),
        (CHAT, {"messages": [{"role": "system", "content": "x"}]}, None),
        ("/v1/responses", {"input": "2 + 2 ="}, "2 + 2 ="),
    ],
)
async def test_training_gets_the_text_by_which_a_task_is_found(client, training, path, body, prompt):
    assert (await client.post(path, json={**body, "collect_trajectory": True})).status_code == 200
    assert training.prompts == [prompt]


async def test_a_slow_check_delays_no_other_request(client, training):
    """The first one may import a scorer's library; a long one compiles a pattern in a child."""
    training.checks_go_on.clear()
    waiting = asyncio.create_task(post(client, COMPLETIONS, **MARKED))
    assert (await post(client, COMPLETIONS)).status_code == 200
    assert not waiting.done()
    training.checks_go_on.set()
    assert (await waiting).json()["trajectory_ids"] == ["traj-0"]


def text_chunk(index, content, reason="null", more="", tail=""):
    choice = f'{{"index":{index},"text":"{content}","logprobs":null,"finish_reason":{reason}{more}}}'
    head = '{"id":"ID","object":"text_completion","created":0,"model":"tiny/byte-model"'
    return f'data: {head},"choices":[{choice}]{tail}}}\n\n'


async def test_the_last_finish_reason_of_a_stream_comes_with_the_trajectory_ids(client):
    got = await transcript(client, COMPLETIONS, n=2, max_tokens=2, **MARKED)
    assert got == (
        text_chunk(0, "H")
        + text_chunk(1, "H")
        + text_chunk(0, "i", '"length"')
        + text_chunk(1, "i", '"length"', tail=',"trajectory_ids":["traj-0","traj-1"]')
        + DONE
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
async def test_an_answer_says_why_its_trajectories_will_not_be_trained_on(client, engine, path, stream):
    engine.warning = "policy@1 is 3 versions behind policy@4"
    body = {"input": "x"} if path == "/v1/responses" else BODIES[path]
    response = await client.post(path, json={**body, "collect_trajectory": True, "stream": stream})
    assert response.text.count(f'"trajectory_warning":"{engine.warning}"') == 1
    engine.warning = ""
    response = await client.post(path, json={**body, "collect_trajectory": True, "stream": stream})
    assert "traj-0" in response.text
    assert "trajectory_warning" not in response.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.99),
        ("top_k", 1),
        ("top_k", 300),
        ("min_p", 0.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 0}),
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("temperature", 0),
        ("temperature", 0.009),
    ],
)
async def test_options_that_bias_the_distribution_are_refused_by_name(client, engine, path, name, value):
    error = await refused(client, path, **MARKED, **{name: value})
    assert error["param"] == name
    assert "the model's own distribution at its temperature" in error["message"]
    assert not engine.requests
    assert (await post(client, path, **{name: value})).status_code == 200


async def test_a_request_that_generates_nothing_is_not_collected(client):
    error = await refused(client, COMPLETIONS, max_tokens=0, echo=True, **MARKED)
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("collect_trajectory", [1, "true", []]),
        ("scoring_function", [1, "", "x" * 513, ["exact"]]),
        (
            "metadata",
            [
                [],
                "x",
                1,
                {"a": "x" * 2**16},
                {"a": "é" * 2**15},
                {"x" * 2**16: 1},
                json.loads('{"a":' * 33 + "1" + "}" * 33),
            ],
        ),
    ],
)
async def test_values_out_of_bounds_name_their_field(client, engine, path, name, values):
    for value in values:
        marked = {"collect_trajectory": True, "scoring_function": None} | {name: value}
        assert (await refused(client, path, **marked))["param"] == name, value
    assert not engine.requests


async def test_a_scorer_without_a_trajectory_is_refused(client):
    error = await refused(client, COMPLETIONS, scoring_function="exact")
    assert error["param"] == "scoring_function"
    assert "collect_trajectory" in error["message"]


async def test_metadata_of_a_request_that_is_not_collected_has_openais_limits(client):
    error = await refused(client, COMPLETIONS, metadata={"answer": 4})
    assert error["param"] == "metadata"
    assert "collect_trajectory" in error["message"]
    assert (await post(client, COMPLETIONS, metadata={"answer": "4"})).json()["metadata"] == {"answer": "4"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("unknown scorer", param="scoring_function"), 400, None),
        (ConflictError("math is not trained here", param="model"), 409, "conflict"),
        (TrainingDisabledError("off"), 409, "training_disabled"),
    ],
    ids=["invalid", "conflict", "disabled"],
)
async def test_a_request_that_cannot_be_collected_is_not_generated(
    client, engine, adapters, training, path, stream, error, status, code
):
    training.error = error
    told = await refused(client, path, status, stream=stream, **MARKED)
    assert (told["code"], told["param"], told["message"]) == (code, error.param, str(error))
    assert not engine.requests
    assert (adapters.leased, client.app.state.services.gate.held) == (0, 0)
    assert (await post(client, path)).status_code == 200
