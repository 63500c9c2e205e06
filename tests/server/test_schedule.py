"""`/v1/training/schedule`: how device time is shared, told and changed while the server runs."""

import asyncio
import math

import pytest
from server.asking import answered, refused

from mlx_parallm.core.device import MODE_SHARES, DeviceSchedule
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.figures import EngineStats

SCHEDULE = "/v1/training/schedule"
RATIOS = {WorkClass.INFERENCE: 0.75, WorkClass.TRAINING: 0.25}


def told(mode="inference_and_training", share=0.12, stall=500.0, inference=0.7, training=0.3):
    return {
        "mode": mode,
        "training_time_share": share,
        "max_decode_stall_ms": stall,
        "priority_ratios": {"inference": inference, "training": training},
        "measured": {"training_share": 0.0, "largest_decode_gap_ms": 0.0},
    }


async def test_what_was_measured(client, engine):
    gaps = EngineStats(alive=True, ready=True).decode_gaps.with_value(0.0625).with_value(0.03)
    engine.state |= {"training_share": 0.11, "decode_gaps": gaps}
    measured = (await client.get(SCHEDULE)).json()["measured"]
    assert measured == {"training_share": 0.11, "largest_decode_gap_ms": 62.5}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"mode": "training_priority"}, DeviceSchedule(0.5, 0.25, RATIOS)),
        ({"mode": "inference_and_training"}, DeviceSchedule(0.12, 0.25, RATIOS)),
        ({"mode": "training_priority", "training_time_share": 0.9}, DeviceSchedule(0.9, 0.25, RATIOS)),
        ({"training_time_share": 1}, DeviceSchedule(1.0, 0.25, RATIOS)),
        ({"max_decode_stall_ms": 70}, DeviceSchedule(0.3, 0.07, RATIOS)),
        ({"max_decode_stall_ms": 60_000, "mode": None}, DeviceSchedule(0.3, 60.0, RATIOS)),
        (
            {"priority_ratios": {"inference": 0.4, "training": 0.6}},
            DeviceSchedule(0.3, 0.25, {WorkClass.INFERENCE: 0.4, WorkClass.TRAINING: 0.6}),
        ),
        (
            {"priority_ratios": {"inference": 1, "training": 0}, "max_decode_stall_ms": 1, "training_time_share": 0.01},
            DeviceSchedule(0.01, 0.001, {WorkClass.INFERENCE: 1.0, WorkClass.TRAINING: 0.0}),
        ),
    ],
    ids=str,
)
async def test_what_is_given_changes_and_the_rest_stays(client, engine, body, expected):
    engine.state["schedule"] = DeviceSchedule(0.3, 0.25, RATIOS)
    answer = await answered(client, SCHEDULE, body)
    assert engine.schedules == [expected]
    assert answer == (await client.get(SCHEDULE)).json()


async def test_a_change_is_answered_with_what_is_in_force(client):
    async def post(**body):
        return (await client.post(SCHEDULE, json=body)).json()

    assert await post(mode="training_priority") == told("training_priority", 0.5)
    assert await post(max_decode_stall_ms=1001) == told("training_priority", 0.5, 1001.0)
    assert await post(training_time_share=0.25) == told("custom", 0.25, 1001.0)
    assert await post(training_time_share=MODE_SHARES["inference_and_training"]) == told(stall=1001.0)
    assert await post(priority_ratios={"inference": 0.5, "training": 0.5}) == told(
        stall=1001.0, inference=0.5, training=0.5
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"mode": None, "priority_ratios": None}, None),
        ({"mode": "fast"}, "mode"),
        ({"mode": 1}, "mode"),
        ({"mode": "inference_only", "training_time_share": 0.5}, "mode"),
        ({"mode": "training_only"}, "mode"),
        ({"training_time_share": 0}, "training_time_share"),
        ({"training_time_share": -0.1}, "training_time_share"),
        ({"training_time_share": 1.01}, "training_time_share"),
        ({"training_time_share": "0.5"}, "training_time_share"),
        ({"training_time_share": True}, "training_time_share"),
        ({"training_time_share": math.nan}, "training_time_share"),
        ({"max_decode_stall_ms": 0}, "max_decode_stall_ms"),
        ({"max_decode_stall_ms": 5e-324}, "max_decode_stall_ms"),
        ({"max_decode_stall_ms": 60_001}, "max_decode_stall_ms"),
        ({"max_decode_stall_ms": math.inf}, "max_decode_stall_ms"),
        ({"priority_ratios": {}}, "priority_ratios.inference"),
        ({"priority_ratios": {"inference": 1}}, "priority_ratios.training"),
        ({"priority_ratios": {"inference": 0.5, "training": 0.4}}, "priority_ratios"),
        ({"priority_ratios": {"inference": 0.5, "training": 0.50001}}, "priority_ratios"),
        ({"priority_ratios": {"inference": 1.5, "training": -0.5}}, "priority_ratios.inference"),
        ({"priority_ratios": {"inference": 0.5, "training": 0.5, "x": 0}}, "priority_ratios.x"),
        ({"priority_ratios": [0.5, 0.5]}, "priority_ratios"),
        ({"training_share": 0.5}, "training_share"),
    ],
    ids=str,
)
async def test_bad_schedules_are_refused_by_name(client, engine, body, param):
    assert (await refused(client, SCHEDULE, **body))["param"] == param
    assert not engine.schedules


@pytest.mark.parametrize(("mode", "route"), [("inference_only", "/v1/training/pause"), ("training_only", "/sleep")])
async def test_modes_that_are_none_here_say_where_to_go(client, mode, route):
    assert route in (await refused(client, SCHEDULE, mode=mode))["message"]


async def test_changes_that_meet_are_both_made(client, engine):
    engine.hold_calls = True
    changes = [
        asyncio.create_task(client.post(SCHEDULE, json=body))
        for body in ({"training_time_share": 0.25}, {"max_decode_stall_ms": 70})
    ]
    await engine.called.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    engine.let_go.set()
    assert [answer.status_code for answer in await asyncio.gather(*changes)] == [200, 200]
    final = (await client.get(SCHEDULE)).json()
    assert (final["training_time_share"], final["max_decode_stall_ms"]) == (0.25, 70)
