"""`truncation: "auto"` of `/v1/responses`: the oldest messages are left out until the rest fits the context."""

import pytest
from server.asking import refusal

URL = "/v1/responses"


def turns(count):
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": f"{k:04d}"} for k in range(count)]


async def post(client, **fields):
    return await client.post(URL, json={"truncation": "auto", **fields})


async def test_the_oldest_messages_go_and_instructions_and_system_messages_stay(client, engine):
    system = {"role": "system", "content": "S"}
    response = await post(client, instructions="I", input=[system, *turns(21)], max_output_tokens=10)
    assert response.status_code == 200, response.text
    assert (
        engine.prompt_text
        == "s:I\ns:S\n" + "".join(f"{turn['role'][0]}:{turn['content']}\n" for turn in turns(21)[15:]) + "a:"
    )
    assert response.json()["usage"]["input_tokens"] + 10 <= 64


async def test_without_a_length_a_quarter_of_the_context_is_left_for_the_answer(client, engine):
    await post(client, input=turns(21))
    assert 64 - 16 - len("u:0000\n") < len(engine.prompt_text) <= 64 - 16


async def test_a_stored_conversation_is_shortened_too(client, engine):
    first = (await client.post(URL, json={"input": turns(7), "max_output_tokens": 4})).json()
    refused = await client.post(URL, json={"input": "0" * 9, "previous_response_id": first["id"]})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answered = await post(client, input="0" * 9, previous_response_id=first["id"])
    assert answered.status_code == 200
    assert engine.prompt_text.endswith("u:000000000\na:")


async def test_a_result_goes_with_its_call(client, engine):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "0" * 30}
    await post(client, input=[*turns(2), call, result, *turns(3)], max_output_tokens=10)
    assert engine.prompt_text == "u:0000\na:0001\nu:0002\na:"


@pytest.mark.parametrize("before", [[], turns(4)])
async def test_a_last_message_that_does_not_fit_is_refused(client, engine, before):
    await refusal(
        post(client, input=[*before, {"role": "user", "content": "x" * 70}]), 400, code="context_length_exceeded"
    )
    assert not engine.requests
