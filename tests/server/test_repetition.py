"""An answer that repeats itself without end: who is asked to end it, and how each protocol says so."""

import pytest
from server.asking import post, refusal

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


async def limits(client, engine, path, **fields):
    """The limits that the engine gets."""
    await client.post(path, json={**BODIES.get(path, FOR_TRAINERS.get(path, {})), **fields})
    return engine.requests[-1].stopping.repetition


WATCHED = [(path, {}, True) for path in BODIES] + [(path, {}, False) for path in FOR_TRAINERS]
OFF = ({"traffic_class": "rollout"}, {"ignore_eos": True}, {"repetition_detection": False})


@pytest.mark.parametrize(("path", "fields", "watched"), WATCHED + [(CHAT, fields, False) for fields in OFF])
async def test_served_answers_are_watched_unless_that_is_off(client, engine, path, fields, watched):
    assert await limits(client, engine, path, **fields) == (RepetitionLimits() if watched else None)


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
async def test_wrong_limits_are_refused(client, value, param):
    await refusal(client.post(CHAT, json={"messages": USER, "repetition_detection": value}), 400, param=param)


# ---- what the answers say ------------------------------------------------------------------------------


@pytest.fixture
def loops(engine):
    """Every answer repeats itself."""
    engine.text, engine.reason = "no no no", FinishReason.REPETITION


@pytest.fixture
def client(thinking_client):
    return thinking_client


REPETITION = '"finish_reason":"repetition"'
SAID = {
    COMPLETIONS: [],
    CHAT: [],
    "/inference/v1/generate": [],
    MESSAGES: ['"stop_reason":"max_tokens"'],
    RESPONSES: ['"status":"incomplete"', '"incomplete_details":{"reason":"max_output_tokens"}'],
    "/api/chat": ['"done_reason":"length"'],
    "/api/generate": ['"done_reason":"length"'],
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("path", SAID)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_api_says_so(client, path, stream):
    """Beside what its own clients know."""
    answer = await client.post(path, json={**BODIES.get(path, {}), **FOR_TRAINERS.get(path, {}), "stream": stream})
    assert [part for part in [REPETITION, *SAID[path]] if part not in answer.text] == []


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
async def test_generate(client):
    vllm = {"prompt": {"prompt_token_ids": [97, 98]}, "logprobs": 0}
    assert (await post(client, "/generate", **vllm))["finish_reasons"] == ["repetition"]
    sglang = await post(client, "/generate", input_ids=[97, 98])
    assert sglang["meta_info"]["finish_reason"] == {"type": "length", "length": 8, "finish_reason": "repetition"}
