"""The routes around generation: models, tokenizer, probes, metrics, state, the OpenAPI document."""

import json
from types import MappingProxyType

import pytest
from pydantic import BaseModel

from mlx_parallm import __version__
from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.errors import StepFailedError
from mlx_parallm.extras.averages import route as average_wire
from mlx_parallm.extras.averages.service import AverageCard
from mlx_parallm.extras.competition import route as compare_wire
from mlx_parallm.extras.competition.comparison import ComparisonCard
from mlx_parallm.extras.people import schema as people_wire
from mlx_parallm.extras.people.service import EditCard, SignalReport
from mlx_parallm.extras.reward_models import route as reward_model_wire
from mlx_parallm.extras.reward_models.cards import RewardModelCard
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.server.api import adapters as wire
from mlx_parallm.server.api import schedule, training, trajectories, update
from mlx_parallm.server.api.chat import ChatBody, ChatCompletion
from mlx_parallm.server.api.completions import Completion, CompletionBody
from mlx_parallm.server.api.control import SleepStatus
from mlx_parallm.server.api.fields import OpenBody
from mlx_parallm.server.api.responses.body import ResponsesBody
from mlx_parallm.server.api.responses.output import ResponseObject


async def test_models(client):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny/byte-model", "base-model", "base"]
    for model in listed["data"]:
        assert (model["object"], model["root"], model["max_model_len"]) == ("model", "tiny/byte-model", 64)
        for name in (model["id"], model["id"].replace("/", "%2F")):
            assert (await client.get(f"/v1/models/{name}")).json() == model


async def test_tokenize_and_back(client):
    tokens = (await client.post("/tokenize", json={"prompt": "ä", "add_special_tokens": False})).json()
    assert tokens == {"tokens": [195, 164], "count": 2, "max_model_len": 64}
    assert (await client.post("/detokenize", json={"tokens": [195, 164]})).json() == {"prompt": "ä"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert bytes(chat["tokens"]) == b"u:x\na:"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_tokenizer_routes_refuse_by_name(client, fault, path, body, param):
    response = await client.post(path, json=body)
    assert (response.status_code, fault(response)["param"]) == (400, param)


async def test_tokenizer_info(client):
    assert (await client.get("/tokenizer_info")).json() == {
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "eos_token_ids": [257],
        "vocab_size": 258,
        "chat_template": "a template",
    }


async def test_probes_and_version(client, engine):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/version")).json() == {"version": __version__}
    engine.state["ready"] = False
    assert ((await client.get("/ready")).status_code, (await client.get("/health")).status_code) == (503, 200)


VLLM_METRICS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "external_prefix_cache_queries_total": "counter",
    "external_prefix_cache_hits_total": "counter",
    "num_preemptions_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "request_success_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "lora_requests_info": "gauge",
}


async def test_metrics_cover_vllms(client, engine, metric):
    engine.state |= {"prefix_cache_queries_total": 192, "prefix_cache_hits_total": 128}
    engine.state |= {"external_prefix_cache_queries_total": 256, "external_prefix_cache_hits_total": 64}
    await client.post("/v1/completions", json={"prompt": "xyz", "max_tokens": 4, "n": 2})
    text = (await client.get("/metrics")).text
    for name, kind in VLLM_METRICS.items():
        assert f"# TYPE mlx_parallm_{name} {kind}\n" in text
    assert await metric(client, "mlx_parallm_num_requests_running") == 3
    assert await metric(client, "mlx_parallm_kv_cache_usage_perc") == 0.25
    assert await metric(client, 'mlx_parallm_request_success_total{finished_reason="length"}') == 2
    assert await metric(client, "mlx_parallm_prefix_cache_queries_total") == 192
    assert await metric(client, "mlx_parallm_prefix_cache_hits_total") == 128
    assert await metric(client, "mlx_parallm_external_prefix_cache_queries_total") == 256
    assert await metric(client, "mlx_parallm_external_prefix_cache_hits_total") == 64
    for name, seconds in (("e2e_request_latency", 0.4), ("request_queue_time", 0.1)):
        assert await metric(client, f"mlx_parallm_{name}_seconds_sum") == pytest.approx(seconds)
    assert await metric(client, "mlx_parallm_inter_token_latency_seconds_count") == 6


async def test_the_time_to_the_first_token_counts_when_that_comes(client, engine, metric):
    """An overloaded server whose clients give up would look fast otherwise."""
    engine.fail_before, engine.error = 2, StepFailedError("gone")
    assert (await client.post("/v1/completions", json={"prompt": "xyz", "max_tokens": 4})).status_code == 500
    assert await metric(client, "mlx_parallm_time_to_first_token_seconds_count") == 1
    assert await metric(client, "mlx_parallm_e2e_request_latency_seconds_count") == 0


async def test_responses_are_counted_by_status(client, metric):
    await client.get("/nope")
    await client.get("/health", headers={"host": "evil.example"})
    assert await metric(client, 'mlx_parallm_http_responses_total{status="404"}') == 1
    assert await metric(client, 'mlx_parallm_http_responses_total{status="403"}') == 1


async def test_debug_state(client):
    state = (await client.get("/debug/state")).json()
    assert (state["engine"]["running"], state["engine"]["detail"]) == (3, {"rows": []})
    assert state["server"]["sequences_limit"] == 128 + 512
    assert state["model"]["vocab_size"] == 258


async def test_debug_state_tells_the_schedule_though_its_mapping_cannot_be_written(client, engine):
    engine.state["schedule"] = DeviceSchedule(
        0.5, 0.25, MappingProxyType({WorkClass.INFERENCE: 0.75, WorkClass.TRAINING: 0.25})
    )
    state = (await client.get("/debug/state")).json()
    assert state["engine"]["schedule"]["priority_ratios"] == {"inference": 0.75, "training": 0.25}
    assert state["engine"]["schedule"]["max_decode_stall_ms"] == 250
    assert state["engine"]["decode_gaps"]["largest"] == 0
    assert state["server"]["asleep"] is False


async def test_two_apps_in_one_process_have_their_own_metrics(make_client, metric):
    first, second = make_client(), make_client()
    await first.post("/v1/completions", json={"prompt": "x"})
    assert await metric(second, "mlx_parallm_e2e_request_latency_seconds_count") == 0


def test_the_document_describes_bodies_answers_and_errors(document):
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    for path, body, answer in (
        ("/v1/completions", CompletionBody, Completion),
        ("/v1/chat/completions", ChatBody, ChatCompletion),
    ):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert_describes(schema, body)
        assert schema["properties"]["logit_bias"]["anyOf"][0]["additionalProperties"] is False
        answered = operation["responses"]["200"]["content"]
        assert answered["application/json"]["schema"] == {"$ref": f"#/components/schemas/{answer.__name__}"}
        assert "text/event-stream" in answered
        assert [*operation["responses"]] == ["200", "default"]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v1/responses", ResponsesBody, ResponseObject),
        ("/v1/load_lora_adapter", wire.LoadLoraBody, wire.LoadedLora),
        ("/v1/unload_lora_adapter", wire.UnloadLoraBody, wire.UnloadedLora),
        ("/v1/adapters/route", wire.RouteBody, wire.AdapterRoute),
        ("/v1/adapters/rollback", wire.RollbackBody, wire.RolledBack),
        ("/v1/adapters/delete", wire.DeleteAdapterBody, wire.DeletedAdapter),
        ("/model/switch-lora", wire.SwitchLoraBody, wire.SwitchedLora),
        ("/v1/model/switch-lora", wire.SwitchLoraBody, wire.SwitchedLora),
        ("/training/checkpoint", wire.SaveCheckpointBody, CheckpointCard),
        ("/v1/training/checkpoint", wire.SaveCheckpointBody, CheckpointCard),
        ("/v1/training/update", update.UpdateBody, UpdateReport),
        ("/v1/training/start", training.ControlBody, training.TrainingObject),
        ("/v1/training/stop", training.ControlBody, training.TrainingObject),
        ("/v1/training/pause", training.ControlBody, training.TrainingObject),
        ("/v1/training/resume", training.ControlBody, training.TrainingObject),
        ("/v1/training/rollback", training.TrainingRollbackBody, training.TrainingObject),
        ("/v1/training/feedback", training.FeedbackBody, training.FeedbackObject),
        ("/v1/training/preference", people_wire.PreferenceBody, EditCard),
        ("/v1/training/reward_model", reward_model_wire.RewardModelBody, RewardModelCard),
        ("/v1/training/average", average_wire.AverageBody, AverageCard),
        ("/v1/training/compare", compare_wire.CompareBody, ComparisonCard),
        ("/v1/training/compare/stop", training.ControlBody, ComparisonCard),
        ("/v1/training/schedule", schedule.ScheduleBody, schedule.ScheduleObject),
    ],
)
def test_the_document_describes_adapter_and_training_routes(document, path, body, answer):
    operation = document["paths"][path]["post"]
    assert_describes(operation["requestBody"]["content"]["application/json"]["schema"], body)
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answered == {"$ref": f"#/components/schemas/{answer.__name__}"}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/training/status", training.TrainingObject),
        ("/v1/training/report", SignalReport),
        ("/v1/training/compare", compare_wire.ComparisonList),
        ("/v1/training/schedule", schedule.ScheduleObject),
        ("/debug/training", training.DebugTraining),
        ("/debug/trajectories", trajectories.DebugTrajectories),
    ],
)
def test_the_document_describes_what_is_asked_of_training(document, path, answer):
    operation = document["paths"][path]["get"]
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answered == {"$ref": f"#/components/schemas/{answer.__name__}"}


def test_the_document_gives_the_schedules_bounds(document):
    operation = document["paths"]["/v1/training/schedule"]["post"]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fields["mode"]["anyOf"][0]["enum"] == ["inference_and_training", "training_priority"]
    assert fields["training_time_share"]["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
    assert fields["max_decode_stall_ms"]["anyOf"][0] == {"minimum": 1, "maximum": 60_000, "type": "number"}


def test_the_document_describes_sleep(document):
    paths = document["paths"]
    for method, path in (("post", "/sleep"), ("post", "/wake_up"), ("get", "/is_sleeping")):
        answered = paths[path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answered == {"$ref": f"#/components/schemas/{SleepStatus.__name__}"}
        assert paths[path][method]["description"]
        assert "requestBody" not in paths[path][method]
    (level,) = paths["/sleep"]["post"]["parameters"]
    assert (level["name"], level["in"], level["required"]) == ("level", "query", False)
    schema = level["schema"]
    assert (schema["minimum"], schema["maximum"], schema["default"]) == (1, 2, 1)


def test_the_document_knows_the_stream_of_events(document):
    operation = document["paths"]["/v1/training/events"]["get"]
    assert set(operation["responses"]["200"]["content"]) == {"text/event-stream"}


def test_the_document_says_which_bodies_may_be_left_out(document):
    paths = document["paths"]
    required = {
        path: paths[path]["post"]["requestBody"]["required"]
        for path in paths
        if "training/" in path and "post" in paths[path] and not path.endswith("/close")
    }
    optional = {"update", "start", "stop", "pause", "resume", "rollback", "checkpoint"}
    assert required == {path: path.rpartition("/")[2] not in optional for path in required}
    assert len(required) == 16


def assert_describes(schema: dict, model: type[BaseModel]):
    assert schema["additionalProperties"] is issubclass(model, OpenBody)
    assert set(schema["properties"]) == set(model.model_fields) | model.IGNORED | set(model.NEUTRAL)
    for name, field in model.model_fields.items():
        nulls = [kind for kind in schema["properties"][name].get("anyOf", []) if kind == {"type": "null"}]
        assert len(nulls) == (0 if field.is_required() else 1), name
