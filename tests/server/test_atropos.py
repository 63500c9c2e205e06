"""Atropos' trajectory API served here: bodies as the environments of atroposlib 0.4.0 send them."""

import gzip
import json
from dataclasses import replace
from functools import partial
from unittest.mock import AsyncMock

import pytest
from server.asking import fault, refusal
from server.fakes import CARD
from server.keys import key_file
from starlette.requests import Request

from mlx_parallm.errors import InvalidRequestError, QueueFullError, StorageError
from mlx_parallm.extras.atropos.trajectory_api import Registration

TRAINER = Registration(32, CARD.context_length, "/runs/one", 10, 0, 10**9, "run-1", "mlx-parallm")
JSON = {"content-type": "application/json"}


@pytest.fixture
def make_client(make_client):
    return partial(make_client, atropos=TRAINER)


def group(scores=(1.0, 0.0), **fields):
    """As `BaseEnv.handle_send_to_api` sends a group, with the defaults that it adds."""
    return {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[-100, -100, 3], [-100, -100, 4]],
        "scores": list(scores),
        "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.7]],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": {},
        "distill_token_ids": None,
        "distill_logprobs": None,
        "env_id": None,
        **fields,
    }


def compressed(payload):
    """The body and headers of `BaseEnv._post_json_with_compression`."""
    return {"content": gzip.compress(json.dumps(payload).encode()), "headers": {**JSON, "content-encoding": "gzip"}}


async def register(client, name="gsm8k", **fields):
    body = {
        "max_token_length": 2048,
        "desired_name": name,
        "weight": 1.0,
        "min_batch_allocation": None,
        "group_size": 2,
        **fields,
    }
    return (await client.post("/register-env", json=body)).json()


async def status_env(client, env_id):
    response = await client.request("GET", "/status-env", json={"env_id": env_id})
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_environment_registers_and_is_told_of_the_trainer(client, training):
    training.state["policy"] = replace(training.state["policy"], step=7)
    first, second, other = [await register(client, name) for name in ("gsm8k", "gsm8k", "math")]
    assert {key: first[key] for key in first if key != "env_id"} == {
        "status": "success",
        "wandb_name": "gsm8k_0",
        "checkpoint_dir": "/runs/one",
        "starting_step": 7,
        "checkpoint_interval": 10,
        "num_steps": 10**9,
    }
    assert (second["wandb_name"], other["wandb_name"]) == ("gsm8k_1", "math_0")
    assert len({first["env_id"], second["env_id"], other["env_id"]}) == 3
    assert (await client.get("/")).json() == {"message": "AtroposLib API"}
    assert (await client.get("/info")).json() == {"batch_size": 32, "max_token_len": CARD.context_length}
    assert (await client.get("/wandb_info")).json() == {"group": "run-1", "project": "mlx-parallm"}


@pytest.mark.parametrize("compress", [False, True])
async def test_a_group_waits_for_training_when_it_is_acknowledged(client, training, compress):
    env_id = (await register(client))["env_id"]
    sent = group(env_id=env_id, overrides=[{"set_advantage_to_zero": True}, {}], messages=None)
    arguments = compressed(sent) if compress else {"json": sent}
    response = await client.post("/scored_data", **arguments)
    assert (response.status_code, response.json()) == (200, {"status": "received"})
    (given,) = training.given
    assert given.source == "atropos:gsm8k_0"
    first, second = given.trajectories
    assert (first.prompt_ids, first.completion_ids, first.sampling_logprobs) == ((1, 2), (3,), (-0.5,))
    assert (first.advantages, second.advantages) == ((0.0,), ())
    assert (first.reward, second.reward) == (1.0, 0.0)
    latest = (await client.get("/latest_example")).json()
    assert latest["tokens"] == sent["tokens"]
    assert latest["images"] is None


async def test_the_queue_is_told_as_atropos_computes_it(client):
    small = (await register(client, "small", group_size=2))["env_id"]
    large = (await register(client, "large", group_size=4, weight=3.0))["env_id"]
    for _ in range(3):
        await client.post("/scored_data", json=group(env_id=small))
    wide = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [0, 0, 0, 1], "env_id": large}
    await client.post("/scored_data", json=wide)
    assert await status_env(client, small) == {
        "current_step": 0,
        "queue_size": 5,  # its own 6 sequences and a pack of 4, in groups of 2
        "unallocated_fraction": 1.0,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.25,
    }
    seen = await status_env(client, large)
    assert (seen["queue_size"], seen["self_queue_size"], seen["env_weight"]) == (3, 1, 0.75)
    assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 4}


async def test_reset_forgets_environments_and_keeps_groups(client, training):
    await client.post("/scored_data", json=group(env_id=(await register(client))["env_id"]))
    response = await client.get("/reset_data")
    assert (response.status_code, response.text, len(training.given)) == (200, "Reset successful", 1)
    assert (await register(client))["wandb_name"] == "gsm8k_0"


async def test_what_does_not_fit_together_is_refused(client, training):
    shares = {"max_token_length": 9, "desired_name": "a", "weight": 1, "group_size": 2, "min_batch_allocation": 0.5}
    await refusal(client.post("/register-env", json=shares), 400, param="min_batch_allocation")
    error = await refusal(client.post("/scored_data_list", json=[group(), group(scores=(1.0,))]), 400)
    assert "scores: there are 1 for 2 sequences" in error["message"]
    assert training.given == [], "a list is taken whole or not at all"


async def test_another_trainer_is_refused(client):
    registration = {"wandb_group": "g", "wandb_project": "p", "batch_size": 4}
    error = await refusal(client.post("/register", json=registration), 409)
    assert "trains on these groups itself" in error["message"]
    answer = (await client.get("/batch")).json()
    assert (answer["status"], answer["batch"]) == ("error", [])


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFullError("full"), 503), (StorageError("disk"), 507), (InvalidRequestError("no advantages"), 400)],
)
async def test_a_group_that_cannot_be_kept_is_not_acknowledged(client, training, error, status):
    """Atropos' clients send a group again after a status from 500 on, and give it up after any other error."""
    training.error = error
    assert (await client.post("/scored_data", json=group())).status_code == status
    training.error = None
    assert (await client.post("/scored_data", json=group())).status_code == 200
    assert len(training.given) == 1


async def test_a_small_body_that_inflates_beyond_the_limit_is_refused(make_client, training):
    client = make_client(max_body_bytes=100_000)
    bomb = gzip.compress(b'{"tokens": [[' + b" " * 10_000_000 + b"1]]}")
    assert len(bomb) < 20_000
    response = await client.post("/scored_data", content=bomb, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 413
    assert training.given == []


@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (b"no gzip", "gzip", 400),
        (gzip.compress(b"{}")[:-4], "gzip", 400),
        (gzip.compress(b"{}") + b"more", "gzip", 400),
        (b"{}", "br", 415),
    ],
    ids=["no gzip", "cut off", "more after its end", "another encoding"],  # compressed data has the time in it
)
async def test_a_body_in_another_encoding_is_refused(client, content, encoding, status):
    response = await client.post("/scored_data", content=content, headers={**JSON, "content-encoding": encoding})
    assert response.status_code == status
    assert fault(response)["message"]


async def test_a_key_with_many_environments_leaves_room_for_those_of_others(make_client, monkeypatch, tmp_path):
    """Those that it registers, and those that it only asks about."""
    monkeypatch.setattr("mlx_parallm.extras.atropos.environments.MAX_ENVIRONMENTS", 10)
    file, sent = key_file(tmp_path, many="train", few="train")
    client = make_client(keys_file=file)
    body = {"max_token_length": 9, "desired_name": "a", "weight": 1, "group_size": 2}

    async def registered(key):
        return (await client.post("/register-env", json=body, headers=sent[key])).status_code

    assert [await registered("many") for _ in range(10)] == [200] * 8 + [429] * 2
    asked = await client.request("GET", "/status-env", json={"env_id": 1}, headers=sent["many"])
    assert asked.status_code == 429
    assert await registered("few") == 200
    monkeypatch.setattr("mlx_parallm.extras.atropos.environments.FORGOTTEN_AFTER_S", 0.0)
    for key in ["many", "few"] * 20:
        assert await registered(key) == 200, "in place of one of its own, or of the key that has more"


async def test_the_api_is_not_there_unless_it_is_asked_for(make_client):
    assert (await make_client(atropos=None).post("/scored_data", json=group())).status_code == 404


# -- groups that are sent again --------------------------------------------------------------------


async def test_a_group_whose_client_left_before_the_answer_is_taken_once(client, training, monkeypatch):
    with monkeypatch.context() as gone:
        gone.setattr(Request, "is_disconnected", AsyncMock(return_value=True))
        await client.post("/scored_data", json=group())
    for taken in (1, 2):  # sent again, and a new one
        assert (await client.post("/scored_data", json=group())).json() == {"status": "received"}
        assert len(training.given) == taken


async def test_groups_of_a_list_that_failed_are_taken_once(client, training, monkeypatch):
    give, calls = training.give, []

    async def second_fails(given):
        calls.append(given)
        if len(calls) == 2:
            raise QueueFullError("full")
        await give(given)

    monkeypatch.setattr(training, "give", second_fails)
    groups = [group(), group(scores=(0.5, 0.0)), group(scores=(0.25, 0.0))]
    assert (await client.post("/scored_data_list", json=groups)).status_code == 503
    assert (await client.post("/scored_data_list", json=groups)).status_code == 200
    assert sorted(given.trajectories[0].reward for given in training.given) == [0.25, 0.5, 1.0]


async def test_the_last_groups_before_a_restart_are_taken_once(make_client, training):
    before = make_client()
    await before.post("/scored_data", json=group())
    training.given_earlier = [given.group_id for given in training.given] + ["other-3", "x"]
    after = make_client()
    assert (await after.post("/scored_data", json=group())).status_code == 200
    assert len(training.given) == 1
    await after.post("/scored_data", json=group())
    assert len(training.given) == 2


async def test_an_environment_is_its_own_keys(make_client, training, tmp_path):
    limited = ("train", {"adapters": ("acme*",)})
    file, sent = key_file(tmp_path, one="train", two="train", acme=limited)
    client = make_client(keys_file=file)
    body = {"max_token_length": 64, "desired_name": "a", "weight": 1.0, "group_size": 2}
    env_id = (await client.post("/register-env", json=body, headers=sent["one"])).json()["env_id"]
    known = {"env_id": env_id}
    ended = [(await client.post("/disconnect-env", json=known, headers=sent[key])).json() for key in ("two", "one")]
    assert [answer["status"] for answer in ended] == ["failure", "success"]
    for key in ("two", "one"):
        assert (await client.post("/scored_data", json=group(env_id=env_id), headers=sent[key])).status_code == 200
    assert [given.source for given in training.given] == ["atropos:unregistered", "atropos:a_0"]
    for method, path, sending in (
        ("POST", "/register-env", body),
        ("POST", "/scored_data", group()),
        ("GET", "/info", None),
        ("GET", "/status", None),
    ):
        answer = await client.request(method, path, json=sending, headers=sent["acme"])
        assert answer.status_code == 404, "they train the default adapter, which this key does not see"
