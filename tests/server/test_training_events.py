"""`GET /v1/training/events`, byte for byte, and every way it ends."""

import asyncio
import math

import httpx
import pytest
from server.asking import eventually, refusal

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.status import TrainingEvent

URL = "/v1/training/events"
AT = 1_800_000_000.25
TOLD = 'event: paused\ndata: {"kind":"paused","at":"2027-01-15T08:00:00.250Z","data":{}}\n\n'


async def test_the_transcript(client, training):
    for event in (
        TrainingEvent("collected", AT, {"trajectory_ids": ("traj-0", "traj-1"), "adapter": AdapterRef("policy", 2)}),
        TrainingEvent("update", AT + 0.5, {"loss": math.nan, "reward_mean": 0.5, "text": "a\nb\u2028ä"}),
        TrainingEvent("paused", AT),
        None,
    ):
        training.told.put_nowait(event)
    response = await client.get(URL)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.text == (
        "event: collected\n"
        'data: {"kind":"collected","at":"2027-01-15T08:00:00.250Z",'
        '"data":{"trajectory_ids":["traj-0","traj-1"],"adapter":"policy@2"}}\n\n'
        "event: update\n"
        'data: {"kind":"update","at":"2027-01-15T08:00:00.750Z",'
        '"data":{"loss":null,"reward_mean":0.5,"text":"a\\nb\u2028ä"}}\n\n' + TOLD
    )
    assert training.listening == 0


async def test_a_client_that_comes_back_says_which_event_was_its_last(client, training):
    training.told.put_nowait(TrainingEvent("paused", AT, id="a-7"))
    training.told.put_nowait(None)
    response = await client.get(URL, headers={"last-event-id": "a-6"})
    assert response.text == f"id: a-7\n{TOLD}"
    assert training.listened_after == ["a-6"]


async def test_a_drain_ends_it(client, training):
    training.told.put_nowait(TrainingEvent("paused", AT))
    request = asyncio.create_task(client.get(URL))
    await eventually(lambda: training.listening and training.told.empty())
    client.app.state.services.lifecycle.begin_drain()
    assert (await request).text == TOLD
    assert training.listening == 0


async def test_a_fault_is_told_and_ends_it(client, training, caplog):
    training.told.put_nowait(TrainingEvent("paused", AT))
    training.told.put_nowait(RuntimeError("/home/me"))
    error = '{"error":{"message":"The server failed; its log says why.","type":"server_error","param":null,'
    assert (await client.get(URL)).text == f'{TOLD}event: error\ndata: {error}"code":"internal_error"}}}}\n\n'
    assert "a stream of training events failed" in caplog.text


async def test_a_client_that_leaves_is_forgotten_and_others_are_not(serving, training):
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        async with client.stream("GET", URL) as stays:
            async with client.stream("GET", URL):
                await eventually(lambda: training.listening == 2)
            await eventually(lambda: training.listening == 1)
            training.told.put_nowait(TrainingEvent("paused", AT))
            assert await anext(stays.aiter_text()) == TOLD
        await eventually(lambda: training.listening == 0)


@pytest.mark.parametrize("training", [None])
async def test_with_training_off_there_is_nothing_to_listen_to(client):
    await refusal(client.get(URL), 409, code="training_disabled")


async def test_nobody_listens_to_a_draining_server(client, training):
    client.app.state.services.lifecycle.begin_drain()
    await refusal(client.get(URL), 503, code="draining")
    assert training.listening == 0
