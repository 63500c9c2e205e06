"""Training over HTTP: status, control, rewards, and every fault's answer."""

import asyncio
import math
from dataclasses import replace

import httpx
import pytest
from server.asking import eventually, fault, post, refusal, refused

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import (
    AdapterFileError,
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    StepFailedError,
    StorageError,
    TrainingDisabledError,
    UnknownTrajectoryError,
)
from mlx_parallm.rl.status import Divergence, EvaluationResult, LevelCard, RolloutStatus, TrainingStatus

UPDATE, STATUS, FEEDBACK = "/v1/training/update", "/v1/training/status", "/v1/training/feedback"
START, PAUSE, RESUME, ROLLBACK = (f"/v1/training/{name}" for name in ("start", "pause", "resume", "rollback"))
ASYNC = (UPDATE, START, PAUSE, RESUME, ROLLBACK)
JSON = {"content-type": "application/json"}
FULL = TrainingStatus(
    state="updating",
    pause_reason="asked",
    adapter="policy",
    current=AdapterRef("policy", 7),
    step=6,
    trajectories_collected=640,
    trajectories_waiting=32,
    groups_ready=4,
    groups_open=2,
    turns={"first": 3, "continued": 5},
    updates_total=6,
    updates_per_second=0.125,
    last_update=1_800_000_000.25,
    metrics={
        "loss": -0.5,
        "reward_mean": 0.75,
        "reward_std": 0.25,
        "kl": 0.0625,
        "entropy": 1.5,
        "clip_fraction": 0.125,
        "ratio_mean": 1.0,
        "staleness": 0.5,
        "grad_norm": math.nan,
    },
    drops={"stale": 8, "zero_variance": 16},
    skips={"not_finite": 1},
    diverged={("kl_step", "hold"): 1},
    last_divergences=(Divergence("kl_step", 5.0, 3.0, "hold", "too far", 1_800_000_000.25),),
    reward_running_mean=0.5,
    evaluation=EvaluationResult(AdapterRef("policy", 5), 5, 0.5, 0.25, 0.75, 32, 1, 1_800_000_000.25),
    rollouts=RolloutStatus("words", "drawing", 9, 6, 2, "task 3: no network", (LevelCard("easy", 0.5, 0.25, 9),)),
    best=AdapterRef("policy", 5),
    checkpoints=("checkpoint-3", "checkpoint-6"),
    trained=("policy",),
    detail={"queue": [1, math.inf], "ref": AdapterRef("policy", 7), "on": True},
)
FULL_JSON = {
    "state": "updating",
    "pause_reason": "asked",
    "lora_adapter": "policy",
    "live_lora": "policy@7",
    "step": 6,
    "trajectories_collected": 640,
    "trajectories_waiting": 32,
    "groups_ready": 4,
    "groups_open": 2,
    "turns": {"first": 3, "continued": 5},
    "updates_total": 6,
    "updates_per_second": 0.125,
    "last_update": "2027-01-15T08:00:00.250Z",
    "metrics": {
        "loss": -0.5,
        "reward_mean": 0.75,
        "reward_std": 0.25,
        "kl": 0.0625,
        "entropy": 1.5,
        "clip_fraction": 0.125,
        "ratio_mean": 1.0,
        "staleness": 0.5,
        "grad_norm": None,
    },
    "drops": {"stale": 8, "zero_variance": 16},
    "skips": {"not_finite": 1},
    "divergences": [
        {
            "signal": "kl_step",
            "value": 5.0,
            "limit": 3.0,
            "action": "hold",
            "reason": "too far",
            "at": "2027-01-15T08:00:00.250Z",
        }
    ],
    "advice": "",
    "reward_running_mean": 0.5,
    "best_lora": "policy@5",
    "evaluation": {
        "lora_adapter": "policy@5",
        "step": 5,
        "mean": 0.5,
        "low": 0.25,
        "high": 0.75,
        "answers": 32,
        "failed": 1,
        "at": "2027-01-15T08:00:00.250Z",
    },
    "rollouts": {
        "environment": "words",
        "state": "drawing",
        "tasks_taken": 9,
        "groups_drawn": 6,
        "tasks_failed": 2,
        "last_failure": "task 3: no network",
        "levels": [{"level": "easy", "success": 0.5, "share": 0.25, "drawn": 9}],
    },
    "available_checkpoints": ["checkpoint-3", "checkpoint-6"],
    "trained_adapters": ["policy"],
    "training_enabled": True,
    "current_lora": None,
    "loss": -0.5,
    "reward_mean": 0.75,
    "reward_std": 0.25,
    "kl": 0.0625,
    "entropy": 1.5,
    "clip_fraction": 0.125,
    "ratio": 1.0,
    "staleness": 0.5,
}


async def test_status(client, training):
    training.state["policy"] = FULL
    response = await client.get(STATUS)
    assert response.json() == FULL_JSON
    assert list(response.json()) == list(FULL_JSON)


async def test_the_current_lora_of_the_status_is_what_the_route_gives(client, training, adapters):
    training.state["policy"] = FULL
    adapters.publish("math")
    adapters.shares = {"math": 0.75, "base": 0.25}
    assert (await client.get(STATUS)).json()["current_lora"] == "math@1"
    assert (await client.get("/debug/training")).json()["adapters"][0]["current_lora"] == "math@1"
    adapters.shares = {"math": 0.25, "base": 0.75}
    assert (await client.get(STATUS)).json()["current_lora"] is None


async def test_status_before_the_first_update(client):
    got = (await client.get(STATUS)).json()
    assert (got["training_enabled"], got["state"], got["lora_adapter"]) == (True, "running", "policy")
    for unknown in ("live_lora", "current_lora", "last_update", "loss", "reward_mean", "kl", "ratio", "evaluation"):
        assert got[unknown] is None
    assert (got["metrics"], got["drops"], got["available_checkpoints"]) == ({}, {}, [])


async def test_status_of_a_name(client, training):
    training.state["code"] = TrainingStatus(state="paused", adapter="code")
    assert (await client.get(STATUS, params={"lora_adapter": "code"})).json()["state"] == "paused"
    for name in ("nope", "x" * 5000):
        error = await refusal(client.get(STATUS, params={"lora_adapter": name}), 404, param="lora_adapter")
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize("path", [START, PAUSE, RESUME])
async def test_control(client, training, path):
    name = path.rpartition("/")[2]
    training.state["policy"] = FULL
    assert await post(client, path, lora_adapter="policy") == FULL_JSON
    assert (await client.post(path)).status_code == 200
    assert await post(client, path) == (await client.get(STATUS)).json()
    assert training.calls == [(name, "policy"), (name, None), (name, None)]


async def test_rollback(client, training):
    await post(client, ROLLBACK)
    await post(client, ROLLBACK, lora_adapter="policy", to="checkpoint-3")
    assert (await client.post(ROLLBACK)).status_code == 200
    assert training.calls == [
        ("rollback", None, None),
        ("rollback", "policy", "checkpoint-3"),
        ("rollback", None, None),
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (UPDATE, {"lora_adapter": "nope"}, "lora_adapter"),
        (PAUSE, {"lora_adapter": "nope"}, "lora_adapter"),
        (RESUME, {"lora_adapter": "x" * 5000}, "lora_adapter"),
        (ROLLBACK, {"lora_adapter": "nope", "to": "best"}, "lora_adapter"),
        (ROLLBACK, {"lora_adapter": "policy", "to": "nope"}, "to"),
        (ROLLBACK, {"to": "x" * 5000}, "to"),
    ],
    ids=str,
)
async def test_unknown_names_say_which_field(client, training, path, body, param):
    error = await refused(client, path, 404, **body)
    assert (error["code"], error["param"]) == ("model_not_found", param)
    assert not training.calls


async def test_feedback(client, training):
    got = await post(client, FEEDBACK, trajectory_id="traj-0", score=-1)
    told = {"score": -1.0, "reward": -0.5, "people": 2, "late": False}
    assert got == {"status": "success", "trajectory_id": "traj-0", "episode_id": None, **told}
    await post(client, FEEDBACK, trajectory_id="traj-0", score=1, user="ann")
    assert training.calls == [("feedback", "traj-0", -1.0, ""), ("feedback", "traj-0", 1.0, "ann")]


async def test_feedback_on_what_is_not_there(client):
    error = await refused(client, FEEDBACK, 404, trajectory_id="traj-9", score=1)
    assert (error["code"], error["param"]) == ("trajectory_not_found", "trajectory_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"trajectory_id": "traj-0"}, "score"),
        ({"score": 1}, "trajectory_id"),
        ({"trajectory_id": "", "score": 1}, "trajectory_id"),
        ({"trajectory_id": "traj-0", "score": math.nan}, "score"),
        ({"trajectory_id": "traj-0", "score": -math.inf}, "score"),
        ({"trajectory_id": "traj-0", "score": "1"}, "score"),
        ({"trajectory_id": "traj-0", "score": True}, "score"),
        ({"trajectory_id": "traj-0", "score": 10**400}, "score"),
        ({"episode_id": "e", "score": 1, "user": "ann"}, "user"),
        ({"trajectory_id": "traj-0", "token_rewards": [1], "user": "ann"}, "user"),
        ({"trajectory_id": "traj-0", "score": 1, "user": "a" * 161}, "user"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_bad_feedback_is_refused_by_name(client, training, body, param):
    assert (await refused(client, FEEDBACK, **body))["param"] == param
    assert not training.calls


@pytest.mark.parametrize("path", [*ASYNC, FEEDBACK])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("the tag is not a plain name", param="checkpoint_name"), 400, None),
        (AdapterFileError("checkpoint-3 holds no state of a trainer"), 400, "invalid_adapter"),
        (UnknownTrajectoryError("forgotten"), 404, "trajectory_not_found"),
        (ConflictError("it was trained on"), 409, "conflict"),
        (TrainingDisabledError("this server does not train"), 409, "training_disabled"),
        (StepFailedError("/home/me"), 500, "step_failed"),
        (EngineDeadError("/home/me"), 503, "engine_dead"),
        (StorageError("the disk is full"), 507, "storage_failed"),
        (RuntimeError("/home/me"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_a_refusal_of_training_is_worded_and_hurts_nobody(client, training, path, error, status, code):
    training.error = error
    body = {"trajectory_id": "traj-0", "score": 1} if path == FEEDBACK else {}
    response = await client.post(path, json=body)
    told = fault(response)
    assert (response.status_code, told["code"], told["param"]) == (status, code, getattr(error, "param", None))
    assert (told["message"] == str(error)) == (status < 500 or code == "storage_failed")
    assert "/home" not in response.text
    assert response.headers.get("x-should-retry") == ("false" if status == 409 else None)
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_body_that_may_be_left_out_is_still_read_as_json(client, training):
    await refusal(
        client.post(PAUSE, content=b'{"lora_adapter":"policy"}', headers={"content-type": "text/plain"}),
        415,
        code="unsupported_media_type",
    )

    async def unannounced():
        yield b'{"lora_adapter":"policy"}'

    await client.post(PAUSE, content=unannounced(), headers=JSON)
    assert training.calls == [("pause", "policy")]


@pytest.mark.parametrize("path", ASYNC)
async def test_nothing_is_begun_while_draining(client, training, path):
    client.app.state.services.lifecycle.begin_drain()
    await refusal(client.post(path, json={}), 503, code="draining")
    assert not training.calls


@pytest.mark.parametrize("path", ASYNC)
async def test_a_client_that_leaves_stops_nothing(client, training, path):
    training.hold = True
    request = asyncio.create_task(client.post(path, json={}))
    await training.held.wait()
    request.cancel()
    await asyncio.wait([request])
    lifecycle = client.app.state.services.lifecycle
    assert lifecycle.working
    training.go_on.set()
    await eventually(lambda: not lifecycle.working)
    assert [call[0] for call in training.calls] == [path.rpartition("/")[2]]


async def test_debug_training(client, training):
    training.state = {
        "policy": replace(FULL, trained=("policy", "code")),
        "code": TrainingStatus(state="idle", adapter="code"),
    }
    got = (await client.get("/debug/training")).json()
    assert got["training_enabled"] is True
    detail = {"queue": [1, None], "ref": "policy@7", "on": True}
    assert got["adapters"][0] == {**FULL_JSON, "trained_adapters": ["policy", "code"], "detail": detail}
    assert [adapter["lora_adapter"] for adapter in got["adapters"]] == ["policy", "code"]


async def test_the_drain_waits_for_an_update(serving, training):
    training.hold = True
    async with serving(shutdown_timeout=60) as server, httpx.AsyncClient(base_url=server.url) as client:
        request = asyncio.create_task(client.post(UPDATE))
        await training.held.wait()
        server.uvicorn.begin_drain()
        assert (await client.get("/ready")).status_code == 503
        training.go_on.set()
        assert (await asyncio.wait_for(request, 30)).json()["status"] == "published"
        await asyncio.wait_for(asyncio.shield(server.stopped), 30)
