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
from mlx_parallm.server.api import adapters as wire
from mlx_parallm.server.api import schedule, training, update
from mlx_parallm.server.errors import ErrorBody


@cache
def described(answer):
    """Checks that an object is such an answer."""
    return Draft202012Validator(TypeAdapter(answer).json_schema(mode="serialization")).validate


SHARES = st.dictionaries(st.sampled_from(["math", "base", "x"]), values, max_size=3).map(lambda some: {"weights": some})
METRICS = st.dictionaries(st.text(max_size=5), values, max_size=3).map(lambda metrics: {"metrics": metrics})
GIVEN = bodies(update.GivenTrajectoryBody, {"prompt_token_ids": [1], "completion_token_ids": [2]})
RATIOS = bodies(schedule.PriorityRatiosBody, {})
ROUTES = {
    "/v1/load_lora_adapter": (bodies(wire.LoadLoraBody, {"lora_name": "x", "lora_path": "x"}), wire.LoadedLora),
    "/v1/unload_lora_adapter": (bodies(wire.UnloadLoraBody, {"lora_name": "math"}), wire.UnloadedLora),
    "/v1/adapters/route": (bodies(wire.RouteBody, {"weights": {"math": 1}}) | SHARES, wire.AdapterRoute),
    "/v1/adapters/rollback": (bodies(wire.RollbackBody, {}), wire.RolledBack),
    "/v1/adapters/delete": (bodies(wire.DeleteAdapterBody, {"lora_name": "math"}), wire.DeletedAdapter),
    "/v1/model/switch-lora": (bodies(wire.SwitchLoraBody, {"version": "math"}), wire.SwitchedLora),
    "/v1/training/checkpoint": (bodies(wire.SaveCheckpointBody, {}) | METRICS, CheckpointCard),
    "/v1/training/update": (
        bodies(update.UpdateBody, {}) | GIVEN.map(lambda given: {"trajectories": [given]}),
        UpdateReport,
    ),
    "/v1/training/rollback": (bodies(training.TrainingRollbackBody, {}), training.TrainingObject),
    "/v1/training/feedback": (
        bodies(training.FeedbackBody, {"trajectory_id": "traj-0", "score": 1}),
        training.FeedbackObject,
    ),
    "/v1/training/preference": (
        bodies(people_wire.PreferenceBody, {"prompt": "x", "chosen": "a", "rejected": "b"}),
        EditCard,
    ),
    "/v1/training/schedule": (
        bodies(schedule.ScheduleBody, {}) | RATIOS.map(lambda ratios: {"priority_ratios": ratios}),
        schedule.ScheduleObject,
    ),
}
"""Bodies and answer of each route."""


@pytest.mark.parametrize("path", ROUTES)
@fuzzed
@given(data=st.data())
def test_random_fields(post_json, adapters, engine, path, data):
    sent, answer = ROUTES[path]
    adapters.known.clear()
    adapters.publish("math")
    adapters.before, adapters.shares = [], {"base": 1.0}
    response = post_json(path, json.dumps(data.draw(sent)))
    if response.status_code == 200:
        described(answer)(json.loads(response.text))
    else:
        assert response.status_code in (400, 404, 409), response.text
        ErrorBody.model_validate_json(response.text)
    assert adapters.leased == 0
    for put in engine.schedules:
        assert 0 < put.training_time_share <= 1
        assert 0 < put.max_decode_stall_s <= 60
        assert sum(put.row_shares.values()) == pytest.approx(1, abs=1e-5)
