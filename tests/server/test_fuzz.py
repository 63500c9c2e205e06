"""Random fields: every answer is a success or an error body, and never a 5xx."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.server.api.adapters import schema as wire
from mlx_parallm.server.api.chat.schema import ChatBody, ChatCompletion
from mlx_parallm.server.api.completions import Completion, CompletionBody
from mlx_parallm.server.api.responses.objects import ResponseObject
from mlx_parallm.server.api.responses.schema import ResponsesBody
from mlx_parallm.server.api.training import objects as training_objects
from mlx_parallm.server.api.training import people_schema as people_wire
from mlx_parallm.server.api.training import schedule as schedule_wire
from mlx_parallm.server.api.training import schema as training_wire

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 3),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def bodies(model, base):
    names = [*model.model_fields, *model.IGNORED, *model.NEUTRAL, "x"]
    return st.dictionaries(st.sampled_from(names), values, max_size=4).map(lambda fields: {**base, **fields})


def check(make_client, engine, path, answer, body):
    async def post():
        async with make_client() as client:
            return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    response = asyncio.run(post())
    if response.status_code == 200:
        if body.get("stream") is not True:
            answer.model_validate_json(response.text)
        assert not engine.live
    else:
        assert response.status_code in (400, 404), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        response.text.encode()


fuzzed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(body=bodies(CompletionBody, {"prompt": "x"}))
def test_completions(make_client, engine, body):
    check(make_client, engine, "/v1/completions", Completion, body)


@fuzzed
@given(body=bodies(ChatBody, {"messages": [{"role": "user", "content": "x"}]}))
def test_chat(make_client, engine, body):
    check(make_client, engine, "/v1/chat/completions", ChatCompletion, body)


@fuzzed
@given(
    body=bodies(ResponsesBody, {"input": "x"})
    | st.lists(
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output"]),
            values | st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "user"]),
            max_size=5,
        ),
        max_size=3,
    ).map(lambda items: {"input": items})
)
def test_responses(make_client, engine, body):
    check(make_client, engine, "/v1/responses", ResponseObject, body)


def check_change(make_client, adapters, path, answer, body):
    async def post():
        async with make_client() as client:
            return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    adapters.known.clear()
    adapters.publish("math")
    response = asyncio.run(post())
    if response.status_code == 200:
        answer.model_validate_json(response.text)
    else:
        assert response.status_code in (400, 404, 409), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert adapters.leased == 0


@fuzzed
@given(body=bodies(wire.LoadLoraBody, {"lora_name": "x", "lora_path": "x"}))
def test_load(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/load_lora_adapter", wire.LoadedLora, body)


@fuzzed
@given(body=bodies(wire.UnloadLoraBody, {"lora_name": "math"}))
def test_unload(make_client, adapters, body):
    adapters.shares = {"base": 1.0}
    check_change(make_client, adapters, "/v1/unload_lora_adapter", wire.UnloadedLora, body)


@fuzzed
@given(
    body=bodies(wire.RouteBody, {"weights": {"math": 1}})
    | st.dictionaries(st.sampled_from(["math", "base", "x"]), values, max_size=3).map(
        lambda shares: {"weights": shares}
    )
)
def test_route(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/adapters/route", wire.AdapterRoute, body)


@fuzzed
@given(body=bodies(wire.RollbackBody, {}))
def test_rollback(make_client, adapters, body):
    adapters.before, adapters.shares = [], {"base": 1.0}
    check_change(make_client, adapters, "/v1/adapters/rollback", wire.RolledBack, body)


@fuzzed
@given(body=bodies(wire.SwitchLoraBody, {"version": "math"}))
def test_switch(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/model/switch-lora", wire.SwitchedLora, body)


@fuzzed
@given(
    body=bodies(wire.SaveCheckpointBody, {})
    | st.dictionaries(st.text(max_size=5), values, max_size=3).map(lambda metrics: {"metrics": metrics})
)
def test_save(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/training/checkpoint", wire.Checkpoint, body)


@fuzzed
@given(
    body=bodies(training_wire.UpdateBody, {})
    | bodies(training_wire.GivenTrajectoryBody, {"prompt_token_ids": [1], "completion_token_ids": [2]}).map(
        lambda given: {"trajectories": [given]}
    )
)
def test_update(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/training/update", training_objects.UpdateObject, body)


@fuzzed
@given(body=bodies(training_wire.TrainingRollbackBody, {}))
def test_training_rollback(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/training/rollback", training_objects.TrainingObject, body)


@fuzzed
@given(body=bodies(training_wire.FeedbackBody, {"trajectory_id": "traj-0", "score": 1}))
def test_feedback(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/training/feedback", training_objects.FeedbackObject, body)


@fuzzed
@given(body=bodies(people_wire.PreferenceBody, {"prompt": "x", "chosen": "a", "rejected": "b"}))
def test_preference(make_client, adapters, body):
    check_change(make_client, adapters, "/v1/training/preference", people_wire.PreferenceObject, body)


@fuzzed
@given(
    body=bodies(schedule_wire.ScheduleBody, {})
    | bodies(schedule_wire.PriorityRatiosBody, {}).map(lambda ratios: {"priority_ratios": ratios})
)
def test_schedule(make_client, adapters, engine, body):
    check_change(make_client, adapters, "/v1/training/schedule", schedule_wire.ScheduleObject, body)
    for schedule in engine.schedules:
        assert 0 < schedule.training_time_share <= 1
        assert 0 < schedule.max_decode_stall_s <= 60
        assert sum(schedule.row_shares.values()) == pytest.approx(1, abs=1e-5)


collected = {"prompt": "x", "collect_trajectory": True, "scoring_function": "exact"}


@fuzzed
@given(
    body=bodies(CompletionBody, collected)
    | st.dictionaries(st.text(max_size=5), values, max_size=3).map(
        lambda given: {**collected, "metadata": {**given, "answer": 1}}
    )
)
def test_collected_completions(make_client, engine, body):
    check(make_client, engine, "/v1/completions", Completion, body)


@fuzzed
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | values.map(lambda v: json.dumps(v).encode()))
def test_raw_bodies(make_client, raw):
    async def post() -> httpx.Response:
        async with make_client() as client:
            return await client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    assert asyncio.run(post()).status_code == 400
