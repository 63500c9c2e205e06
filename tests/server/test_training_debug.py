"""`GET /debug/trajectories`."""

import math

import pytest
from server.asking import refusal

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup


def trajectory(number):
    collection = CollectionSpec("exact", {"answer": {"value": 4}})
    return Trajectory(
        f"traj-{number}",
        "group-0",
        2,
        AdapterRef("policy", 2) if number else BASE_ADAPTER,
        (120,),
        (72, 257),
        (-0.5, -math.inf),
        0.5,
        "H",
        FinishReason.STOP,
        collection,
        1_800_000_000.5,
    )


async def test_debug_trajectories(client, training):
    group = TrajectoryGroup("policy", [trajectory(0), trajectory(1)])
    training.buffer.add(group)
    group.members[0].score(1.0)
    training.buffer.drop(group, DropReason.STALE, group.scored)
    got = (await client.get("/debug/trajectories")).json()
    newest = {
        "trajectory_id": "traj-1",
        "group_id": "group-0",
        "group_size": 2,
        "episode_id": None,
        "turn": None,
        "lora_adapter": "policy@2",
        "state": "waiting",
        "reason": "",
        "reward": None,
        "scoring_function": "exact",
        "metadata": {"answer": {"value": 4}},
        "prompt_token_ids": [120],
        "completion_token_ids": [72, 257],
        "sampling_logprobs": [-0.5, None],
        "temperature": 0.5,
        "text": "H",
        "finish_reason": "stop",
        "created": "2027-01-15T08:00:00.500Z",
    }
    older = {
        **newest,
        "trajectory_id": "traj-0",
        "lora_adapter": "base@0",
        "state": "dropped",
        "reason": "stale",
        "reward": 1.0,
    }
    assert got == {"object": "list", "data": [newest, older]}
    assert len((await client.get("/debug/trajectories?limit=1")).json()["data"]) == 1


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1.5", ""])
async def test_a_bad_limit_is_refused_by_name(client, limit):
    await refusal(client.get("/debug/trajectories", params={"limit": limit}), 400, param="limit")
