"""An answer that repeats itself without end: who is asked to end it, and how each protocol says so."""

import json

import pytest
from server.asking import post

from mlx_parallm.core.requests import FinishReason, RepetitionLimits

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
BODIES = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    "/api/chat": {"model": "base", "messages": USER},
    "/api/generate": {"model": "base", "prompt": "hi"},
}
FOR_TRAINERS = {
    "/inference/v1/generate": {"token_ids": [1, 2]},
    "/generate": {"prompts": ["ab"]},
}
OFF = {
    "a rollout": {"traffic_class": "rollout"},
    "a length": {"ignore_eos": True},
    "off": {"repetition_detection": False},
}


async def limits(client, engine, path, **fields):
    """The limits that the engine gets."""
    await client.post(path, json={**BODIES.get(path, FOR_TRAINERS.get(path, {})), **fields})
    return engine.requests[-1].stopping.repetition


@pytest.mark.parametrize("path", BODIES)
async def test_served_answers_are_watched(client, engine, path):
    assert await limits(client, engine, path) == RepetitionLimits()


@pytest.mark.parametrize("path", FOR_TRAINERS)
async def test_routes_for_trainers_are_not(client, engine, path):
    assert await limits(client, engine, path) is None


@pytest.mark.parametrize("fields", OFF.values(), ids=OFF)
async def test_what_turns_it_off(client, engine, fields):
    assert await limits(client, engine, CHAT, **fields) is None


async def test_collected_answers_are_watched_only_if_they_ask(client, engine):
    assert await limits(client, engine, CHAT, collect_trajectory=True) is None
    asked = await limits(client, engine, CHAT, collect_trajectory=True, repetition_detection=True)
    assert asked == RepetitionLimits()
    assert await limits(client, engine, CHAT, collect_trajectory=True, traffic_class="live") is None


async def test_the_operator_turns_it_off_and_a_request_on(make_client, engine):
    client = make_client(stop_repetition=False)
    assert await limits(client, engine, CHAT) is None
    assert await limits(client, engine, MESSAGES, repetition_detection=True) == RepetitionLimits()


@pytest.mark.parametrize(("path", "within"), [(CHAT, None), ("/inference/v1/generate", "sampling_params")])
async def test_limits_in_the_form_of_vllm(client, engine, path, within):
    asked = {"repetition_detection": {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}}
    expected = RepetitionLimits(20, 3, 4, min_tokens=0, min_tokens_of_few=0)
    assert await limits(client, engine, path, **({within: asked} if within else asked)) == expected
    asked = {"repetition_detection": {"max_pattern_size": 0}}
    assert await limits(client, engine, path, **({within: asked} if within else asked)) is None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"max_pattern_size": 4}, "repetition_detection.min_count"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": 10_000, "min_count": 2}, "repetition_detection.max_pattern_size"),
        (3, "repetition_detection"),
    ],
)
async def test_wrong_limits_are_refused(client, fault, value, param):
    response = await client.post(CHAT, json={"messages": USER, "repetition_detection": value})
    assert response.status_code == 400
    assert fault(response)["param"] == param


# ---- what the answers say ------------------------------------------------------------------------------


@pytest.fixture
def loops(engine):
    """Every answer repeats itself."""
    engine.text, engine.reason = "no no no", FinishReason.REPETITION


@pytest.fixture
def client(thinking_client):
    return thinking_client


def last_events(response):
    """The objects of a stream."""
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/inference/v1/generate"])
async def test_openai(client, path):
    body = {**BODIES.get(path, {}), **FOR_TRAINERS.get(path, {})}
    (choice,) = (await post(client, path, **body))["choices"]
    assert choice["finish_reason"] == "repetition"
    events = last_events(await client.post(path, json={**body, "stream": True}))
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "repetition"


async def test_a_call_that_repeats_itself_is_no_call_to_run(client, engine):
    """Its arguments are what was written, as with `length`."""
    engine.text, engine.reason = '<tool_call>\n{"name": "now", "arguments": {"at": [0, 0, 0', FinishReason.REPETITION
    (choice,) = (await post(client, CHAT, messages=USER, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "repetition"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"at": [0, 0')
    tools = [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    assert (await post(client, MESSAGES, **{**BODIES[MESSAGES], "max_tokens": 99}, tools=tools))["stop_reason"] == (
        "max_tokens"
    )


@pytest.mark.usefixtures("loops")
async def test_messages(client):
    whole = await post(client, MESSAGES, **BODIES[MESSAGES])
    assert (whole["stop_reason"], whole["finish_reason"]) == ("max_tokens", "repetition")
    events = last_events(await client.post(MESSAGES, json={**BODIES[MESSAGES], "stream": True}))
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert end == {"stop_reason": "max_tokens", "stop_sequence": None, "finish_reason": "repetition"}


@pytest.mark.usefixtures("loops")
async def test_responses(client):
    whole = await post(client, RESPONSES, input="hi")
    events = last_events(await client.post(RESPONSES, json={"input": "hi", "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["finish_reason"]) == ("incomplete", "repetition")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollama(client, path):
    whole = await post(client, path, **BODIES[path], stream=False)
    *_, last = last_events(await client.post(path, json=BODIES[path]))
    for answer in (whole, last):
        assert (answer["done_reason"], answer["finish_reason"]) == ("length", "repetition")


@pytest.mark.usefixtures("loops")
async def test_generate(client):
    vllm = {"prompt": {"prompt_token_ids": [97, 98]}, "logprobs": 0}
    assert (await post(client, "/generate", **vllm))["finish_reasons"] == ["repetition"]
    sglang = await post(client, "/generate", input_ids=[97, 98])
    assert sglang["meta_info"]["finish_reason"] == {"type": "length", "length": 8, "finish_reason": "repetition"}


async def test_other_answers_do_not_have_the_field(client):
    for path in (RESPONSES, MESSAGES, "/api/chat"):
        assert "finish_reason" not in await post(client, path, **BODIES[path], **({"stream": False}))


@pytest.mark.usefixtures("loops")
async def test_it_is_counted(client, metric):
    await post(client, CHAT, messages=USER, n=2)
    assert await metric(client, 'mlx_parallm_request_success_total{finished_reason="repetition"}') == 2
