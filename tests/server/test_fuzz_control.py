"""Random fields in the routes that change adapters and training: each answer is a success or an error, never a 5xx."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from server.fuzzing import bodies, fuzzed, values

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.extras.people import schema as people_wire
from mlx_parallm.extras.people.service import EditCard
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.server.api.adapters import schema as wire
from mlx_parallm.server.api.training import objects as training_objects
from mlx_parallm.server.api.training import schedule as schedule_wire
from mlx_parallm.server.api.training import schema as training_wire
from mlx_parallm.server.errors import ErrorBody


@cache
def described(answer):
    """Checks that an object is such an answer."""
    return Draft202012Validator(TypeAdapter(answer).json_schema(mode="serialization")).validate


def check(post_json, adapters, path, answer, body):
    adapters.known.clear()
    adapters.publish("math")
    response = post_json(path, json.dumps(body))
    if response.status_code == 200:
        described(answer)(json.loads(response.text))
    else:
        assert response.status_code in (400, 404, 409), response.text
        ErrorBody.model_validate_json(response.text)
    assert adapters.leased == 0


@fuzzed
@given(body=bodies(wire.LoadLoraBody, {"lora_name": "x", "lora_path": "x"}))
def test_load(post_json, adapters, body):
    check(post_json, adapters, "/v1/load_lora_adapter", wire.LoadedLora, body)


@fuzzed
@given(body=bodies(wire.UnloadLoraBody, {"lora_name": "math"}))
def test_unload(post_json, adapters, body):
    adapters.shares = {"base": 1.0}
    check(post_json, adapters, "/v1/unload_lora_adapter", wire.UnloadedLora, body)


@fuzzed
@given(
    body=bodies(wire.RouteBody, {"weights": {"math": 1}})
    | st.dictionaries(st.sampled_from(["math", "base", "x"]), values, max_size=3).map(
        lambda shares: {"weights": shares}
    )
)
def test_route(post_json, adapters, body):
    check(post_json, adapters, "/v1/adapters/route", wire.AdapterRoute, body)


@fuzzed
@given(body=bodies(wire.RollbackBody, {}))
def test_rollback(post_json, adapters, body):
    adapters.before, adapters.shares = [], {"base": 1.0}
    check(post_json, adapters, "/v1/adapters/rollback", wire.RolledBack, body)


@fuzzed
@given(body=bodies(wire.DeleteAdapterBody, {"lora_name": "math"}))
def test_delete(post_json, adapters, body):
    check(post_json, adapters, "/v1/adapters/delete", wire.DeletedAdapter, body)


@fuzzed
@given(body=bodies(wire.SwitchLoraBody, {"version": "math"}))
def test_switch(post_json, adapters, body):
    check(post_json, adapters, "/v1/model/switch-lora", wire.SwitchedLora, body)


@fuzzed
@given(
    body=bodies(wire.SaveCheckpointBody, {})
    | st.dictionaries(st.text(max_size=5), values, max_size=3).map(lambda metrics: {"metrics": metrics})
)
def test_save(post_json, adapters, body):
    check(post_json, adapters, "/v1/training/checkpoint", CheckpointCard, body)


@fuzzed
@given(
    body=bodies(training_wire.UpdateBody, {})
    | bodies(training_wire.GivenTrajectoryBody, {"prompt_token_ids": [1], "completion_token_ids": [2]}).map(
        lambda given: {"trajectories": [given]}
    )
)
def test_update(post_json, adapters, body):
    check(post_json, adapters, "/v1/training/update", UpdateReport, body)


@fuzzed
@given(body=bodies(training_wire.TrainingRollbackBody, {}))
def test_training_rollback(post_json, adapters, body):
    check(post_json, adapters, "/v1/training/rollback", training_objects.TrainingObject, body)


@fuzzed
@given(body=bodies(training_wire.FeedbackBody, {"trajectory_id": "traj-0", "score": 1}))
def test_feedback(post_json, adapters, body):
    check(post_json, adapters, "/v1/training/feedback", training_objects.FeedbackObject, body)


@fuzzed
@given(body=bodies(people_wire.PreferenceBody, {"prompt": "x", "chosen": "a", "rejected": "b"}))
def test_preference(post_json, adapters, body):
    check(post_json, adapters, "/v1/training/preference", EditCard, body)


@fuzzed
@given(
    body=bodies(schedule_wire.ScheduleBody, {})
    | bodies(schedule_wire.PriorityRatiosBody, {}).map(lambda ratios: {"priority_ratios": ratios})
)
def test_schedule(post_json, adapters, engine, body):
    check(post_json, adapters, "/v1/training/schedule", schedule_wire.ScheduleObject, body)
    for schedule in engine.schedules:
        assert 0 < schedule.training_time_share <= 1
        assert 0 < schedule.max_decode_stall_s <= 60
        assert sum(schedule.row_shares.values()) == pytest.approx(1, abs=1e-5)
