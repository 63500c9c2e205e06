"""Loading, listing, routing and saving adapters over HTTP: successes, and every fault's answer."""

import math
from dataclasses import replace

import pytest
from server.asking import fault, post, refusal, refused

from mlx_parallm.adapters.cards import AdapterStats, CheckpointCard
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.errors import (
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    StorageError,
)
from mlx_parallm.extras.competition.comparison import ComparisonSpec

LOAD, UNLOAD, ROUTE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters/route"
ROLLBACK, SWITCH, SAVE = "/v1/adapters/rollback", "/v1/model/switch-lora", "/v1/training/checkpoint"
DELETE = "/v1/adapters/delete"
POSTS = {
    LOAD: {"lora_name": "new", "lora_path": "/adapters/new"},
    UNLOAD: {"lora_name": "math"},
    ROUTE: {"weights": {"math": 1}},
    ROLLBACK: {"lora_name": "math"},
    SWITCH: {"version": "math"},
    "/model/switch-lora": {"version": "math"},
    SAVE: {"lora_name": "math"},
    "/training/checkpoint": {"lora_name": "math"},
}
"""Every route that takes a body, and a body that works."""
MATH_2 = {
    "id": "math@2",
    "name": "math",
    "version": 2,
    "live": True,
    "residence": "slot",
    "root": "",
    "rank": 8,
    "alpha": 16.0,
    "targets": ["q_proj"],
    "bytes": 64,
    "created": 1_800_000_000,
    "leases": 0,
    "requests": 0,
    "unnamed_share": 0.0,
    "checkpoint": None,
    "base_model_name": "",
    "warning": "",
}


@pytest.fixture(autouse=True)
def versions(adapters):
    adapters.publish("math")
    adapters.publish("math")


async def test_load(client, adapters):
    got = await post(client, LOAD, lora_name="code", lora_path="/adapters/code", is_3d_lora_weight=False)
    told = {"status": "success", "lora_name": "code", "lora_adapter": "code@1"}
    assert got == {**MATH_2, "id": "code@1", "name": "code", "version": 1, **told}
    assert got["id"] in [adapter["id"] for adapter in (await client.get("/v1/adapters")).json()["data"]]


async def test_the_base_model_may_be_named(client, adapters):
    """By any of its names."""
    for number, name in enumerate(("tiny/byte-model", "base-model"), 1):
        field = {"base_model_name": name}
        await post(client, LOAD, lora_name=f"code{number}", lora_path="/adapters/code", **field)
        await post(client, "/load_lora_adapter", lora_name="code", lora_path="/adapters/code", **field)
        await post(client, UNLOAD, lora_name=f"code{number}", **field)
    assert adapters.bases == ["tiny/byte-model"] * 6
    for path, more in ((LOAD, {"lora_path": "/x"}), ("/load_lora_adapter", {"lora_path": "/x"}), (UNLOAD, {})):
        error = await refused(client, path, 404, lora_name="new", base_model_name="nobody", **more)
        assert error["param"] == "base_model_name"
        assert "tiny/byte-model" in error["message"]


async def test_load_in_place(client):
    body = {"lora_name": "math", "lora_path": "/adapters/math"}
    assert "load_inplace" in (await refused(client, LOAD, **body))["message"]
    assert (await post(client, LOAD, **body, load_inplace=True))["lora_adapter"] == "math@3"


async def test_unload(client, adapters):
    assert await post(client, UNLOAD, lora_name="math@1", lora_int_id=7) == {
        "status": "success",
        "unloaded": ["math@1"],
    }
    assert (await client.delete("/v1/adapters/math%402")).json() == {"status": "success", "unloaded": ["math@2"]}
    assert adapters.cards() == ()


async def test_no_name_of_the_base_model_is_that_of_an_adapter(client, adapters):
    name = "tiny/byte-model"
    for response in (await client.post(UNLOAD, json={"lora_name": name}), await client.delete(f"/v1/adapters/{name}")):
        assert response.status_code == 404
        assert response.json()["error"]["message"].startswith("The base model is no adapter; it cannot be unloaded.")


async def test_delete_looks_first_and_removes_then(client, adapters):
    parts = [
        {"what": "versions that are loaded", "path": "", "count": 2, "bytes": 0},
        {"what": "files", "path": "/run/math", "count": 3, "bytes": 64},
    ]
    told = {"status": "success", "lora_name": "math", "parts": parts, "in_training": False}
    assert await post(client, DELETE, lora_name="math", dry_run=True) == {**told, "deleted": False}
    assert len(adapters.cards()) == 2
    assert await post(client, DELETE, lora_name="math") == {**told, "deleted": True}
    assert adapters.cards() == ()
    assert (await client.post(DELETE, json={"lora_name": "math"})).status_code == 404


async def test_an_adapter_in_training_is_deleted_only_if_that_is_stopped_first(client, adapters, training):
    adapters.publish("code")
    await post(client, "/v1/training/start", lora_adapter="code")
    error = await refused(client, DELETE, 409, lora_name="code")
    assert "POST /v1/training/stop" in error["message"]
    assert (await post(client, DELETE, lora_name="code", dry_run=True))["in_training"]
    assert (await post(client, DELETE, lora_name="code", stop_training=True))["deleted"]
    assert ("stop", "code") in training.calls


@pytest.mark.parametrize("path", [UNLOAD, "/unload_lora_adapter", ROLLBACK])
async def test_an_adapter_in_training_is_left_to_its_training(client, adapters, path):
    adapters.publish("code")
    await post(client, "/v1/training/start", lora_adapter="code")
    message = (await refused(client, path, 409, lora_name="code"))["message"]
    assert message.startswith("'code' is in training here: ")
    assert "POST /v1/training/" in message
    assert adapters.known


async def test_the_list_tells_the_route_and_the_bank(client, adapters):
    adapters.state = AdapterStats(slots=8, slots_used=2, slots_pinned=1, bank_bytes=4096, route_changed=True)
    got = (await client.get("/v1/adapters")).json()
    older = {**MATH_2, "id": "math@1", "version": 1, "live": False}
    assert got == {
        "object": "list",
        "data": [older, MATH_2],
        "route": {"base": 1.0},
        "route_changed": True,
        "base_requests": 0,
        "slots": {"total": 8, "used": 2, "pinned": 1},
        "bank_bytes": 4096,
    }
    assert (await client.get("/v1/adapters/math")).json() == MATH_2
    assert (await client.get("/v1/adapters/math@1")).json() == older


async def test_versions_that_are_compared_share_what_their_name_gets(client, adapters, competition):
    adapters.publish("policy")
    adapters.publish("policy")
    adapters.shares = {"base": 0.5, "policy": 0.25, "math@1": 0.25}

    async def shares():
        return {card["id"]: card["unnamed_share"] for card in (await client.get("/v1/adapters")).json()["data"]}

    alone = {"math@1": 0.25, "math@2": 0.0, "policy@1": 0.0, "policy@2": 0.25}
    assert await shares() == alone
    await competition.start(None, ComparisonSpec("policy@1"), EVERYTHING)
    assert await shares() == alone | {"policy@1": 0.05, "policy@2": 0.2}
    await competition.stop(None, EVERYTHING)
    assert await shares() == alone


async def test_route_set_read_reset(client):
    weights = {"math@1": 9, "math@2": 1, "base": 0}
    got = await post(client, ROUTE, weights=weights)
    assert got == {"route": {"math@1": 0.9, "math@2": 0.1, "base": 0.0}}
    assert (await client.get(ROUTE)).json() == got
    assert (await client.delete(ROUTE)).json() == {"route": {"base": 1.0}}


async def test_rollback_of_a_name_and_of_the_route(client):
    await post(client, ROUTE, weights={"math@2": 1})
    named = {"status": "success", "lora_adapter": "math@1", "route": {"math@2": 1.0}}
    assert await post(client, ROLLBACK, lora_name="math") == named
    assert await post(client, ROLLBACK) == {"status": "success", "lora_adapter": "base@0", "route": {"base": 1.0}}
    assert (await refused(client, ROLLBACK, status=409))["code"] == "conflict"


async def test_the_tag_best_is_that_of_the_version_which_training_calls_the_best(client, adapters, training):
    untrained, trained = (AdapterRef("policy", number) for number in (1, 4))
    cards = [CheckpointCard(f"checkpoint-{ref.version}", ref, ref.version, "", 0) for ref in (untrained, trained)]
    adapters.saved = [replace(cards[0], tags=("best", "before-lesson")), replace(cards[1], tags=("latest",))]

    async def tags():
        return [each["tags"] for each in (await client.get("/v1/checkpoints")).json()["data"]]

    assert await tags() == [["best", "before-lesson"], ["latest"]]
    training.state["policy"] = replace(training.state["policy"], best=trained)
    assert await tags() == [["before-lesson"], ["latest"]], "the best one is not saved yet"
    training.state["policy"] = replace(training.state["policy"], best=untrained)
    assert await tags() == [["best", "before-lesson"], ["latest"]]


@pytest.mark.parametrize("path", [SWITCH, "/model/switch-lora"])
async def test_switch(client, adapters, path):
    got = await post(client, path, version="math")
    assert got == {"status": "success", "current_lora": "math@2", "route": {"math": 1.0}}
    assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["lora_adapter"] == "math@2"
    assert (await post(client, path, version="base"))["current_lora"] == "base@0"
    assert adapters.leased == 0


@pytest.mark.parametrize("path", [SAVE, "/training/checkpoint"])
async def test_checkpoints(client, path):
    got = await post(client, path, checkpoint_name="good", lora_name="math@1", step=7, metrics={"loss": 0.5, "n": 2})
    told = {"lora_adapter": "math@1", "step": 7, "created": 1_800_000_000, "tags": ["latest", "good"]}
    assert got == {"name": "checkpoint-7", **told, "metrics": {"loss": 0.5, "n": 2.0}}
    second = await post(client, path)
    assert (second["name"], second["tags"], second["metrics"]) == ("checkpoint-2", ["latest"], {})
    third = await client.post(path)
    assert (third.status_code, third.json()["name"]) == (200, "checkpoint-3"), "without a body"
    listed = await client.get("/v1/checkpoints")
    assert listed.json() == {"object": "list", "data": [got, second, third.json()]}
    assert "/secret" not in listed.text


async def test_an_adapter_in_training_is_saved_by_what_trains_it(client, adapters, training):
    training.saves = ("math",)
    got = await post(client, SAVE, checkpoint_name="good", lora_name="math", step=7, metrics={"loss": 0.5})
    assert (got["name"], got["tags"]) == ("checkpoint-9", ["good"])
    await post(client, SAVE)
    assert training.calls == [("save", None, "math", 7, ["good"], {"loss": 0.5}), ("save", None, None, None, [], {})]
    await post(client, SAVE, lora_name="math@1")
    assert [card.name for card in adapters.saved] == ["checkpoint-1"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AdapterFileError("lora_B of layer 3 is not finite", param="lora_path"), 400, "invalid_adapter"),
        (InvalidRequestError("not a plain name"), 400, None),
        (ConflictError("a route leads to it"), 409, "conflict"),
        (AdapterUnavailableError("/home/me"), 503, "adapter_unavailable"),
        (EngineDeadError("/home/me"), 503, "engine_dead"),
        (StorageError("the disk is full"), 507, "storage_failed"),
        (OSError(28, "No space left on device", "/home/me"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_18_a_refusal_of_the_adapters_is_worded_and_hurts_nobody(client, adapters, path, error, status, code):
    adapters.error = error
    response = await client.post(path, json=POSTS[path])
    told = fault(response)
    assert (response.status_code, told["code"], told["param"]) == (status, code, getattr(error, "param", None))
    assert (told["message"] == str(error)) == (status < 500 or code == "storage_failed")
    assert "/home" not in response.text
    assert response.headers.get("x-should-retry") == ("false" if status == 409 else None)
    assert (await client.post("/v1/completions", json={"prompt": "x", "model": "math"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (UNLOAD, {"lora_name": "nope"}, "lora_name"),
        (UNLOAD, {"lora_name": "../../x"}, "lora_name"),
        (UNLOAD, {"lora_name": "x" * 5000}, "lora_name"),
        (ROUTE, {"weights": {"math": 1, "nope": 1}}, "weights"),
        (ROUTE, {"weights": {"x" * 5000: 1}}, "weights"),
        (ROLLBACK, {"lora_name": "nope"}, "lora_name"),
        (ROLLBACK, {"lora_name": "x" * 5000}, "lora_name"),
        (SWITCH, {"version": "math@9"}, "version"),
        (SWITCH, {"version": "x" * 5000}, "version"),
        (SAVE, {"lora_name": "nope"}, "lora_name"),
        (SAVE, {"lora_name": "x" * 5000}, "lora_name"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_16_unknown_names_name_their_field(client, adapters, path, body, param):
    error = await refused(client, path, status=404, **body)
    assert (error["code"], error["param"]) == ("model_not_found", param)
    assert adapters.shares == {"base": 1.0}


@pytest.mark.parametrize("name", ["nope", "math@9", "base", "a%2Fb", "%2e%2e", "%C3%A4", "%ED%A0%80", "x" * 5000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_16_17_unknown_names_in_a_path(client, method, name):
    await refusal(client.request(method, f"/v1/adapters/{name}"), 404, code="model_not_found")
    if name != "base":
        assert (await client.get(f"/v1/models/{name}")).status_code == 404


async def test_17_names_in_a_path_reach_the_adapters_as_text(client, adapters):
    for sent, name in (("a/b", "a/b"), ("a%2Fb", "a/b"), ("%252e", "%2e"), ("math%409", "math@9")):
        await client.get(f"/v1/adapters/{sent}")
        assert adapters.asked[-1] == name


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x"}, "lora_path"),
        (LOAD, {"lora_name": "", "lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x" * 161, "lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": "y" * 5000}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": ["/x"]}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "load_inplace": 1}, "load_inplace"),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "lora_rank": 8}, "lora_rank"),
        (UNLOAD, {}, "lora_name"),
        (UNLOAD, {"lora_name": 5}, "lora_name"),
        (ROUTE, {}, "weights"),
        (ROUTE, {"weights": {}}, "weights"),
        (ROUTE, {"weights": []}, "weights"),
        (ROUTE, {"weights": {"math": 0}}, "weights"),
        (ROUTE, {"weights": {"math": -1, "base": 2}}, "weights"),
        (ROUTE, {"weights": {"math": math.nan}}, "weights"),
        (ROUTE, {"weights": {"math": math.inf}}, "weights"),
        (ROUTE, {"weights": {"math": 10**400}}, "weights"),
        (ROUTE, {"weights": {"math": True}}, "weights"),
        (ROUTE, {"weights": {"math": "1"}}, "weights"),
        (ROUTE, {"weights": {f"math@{k}": 1 for k in range(17)}}, "weights"),
        (ROLLBACK, {"lora_name": 1}, "lora_name"),
        (ROLLBACK, {"version": 1}, "version"),
        (SWITCH, {}, "version"),
        (SWITCH, {"version": 2}, "version"),
        (SWITCH, {"version": None}, "version"),
        (SAVE, {"checkpoint_name": ""}, "checkpoint_name"),
        (SAVE, {"checkpoint_name": "x" * 161}, "checkpoint_name"),
        (SAVE, {"step": -1}, "step"),
        (SAVE, {"step": 1.5}, "step"),
        (SAVE, {"step": 2**31}, "step"),
        (SAVE, {"metrics": {"loss": "low"}}, "metrics"),
        (SAVE, {"metrics": {"loss": math.nan}}, "metrics"),
        (SAVE, {"metrics": {"loss": 10**400}}, "metrics"),
        (SAVE, {"metrics": {"x" * 129: 1}}, "metrics"),
        (SAVE, {"metrics": {str(k): 1 for k in range(65)}}, "metrics"),
        (SAVE, {"folder": "/etc"}, "folder"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bodies_are_refused_by_name(client, adapters, path, body, param):
    assert (await refused(client, path, **body))["param"] == param
    assert (len(adapters.known), adapters.shares, adapters.saved) == (2, {"base": 1.0}, [])
