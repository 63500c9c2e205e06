"""The Tinker API over stand-ins, with the JSON bodies of the SDK 0.24.1: order, repetition, expiry, and mistakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from protocols.fake_policies import FakePolicies
from server.fake_control import FakeAdapters, FakeTraining
from server.fakes import CARD, ByteTokenizer, FakeEngine
from server.keys import key_file
from server.one_model import OneModel

from mlx_parallm.config import ServerConfig, TinkerConfig
from mlx_parallm.core.summed import SummedLoss, TargetedTokens, TokenLoss
from mlx_parallm.errors import EngineError, InvalidRequestError
from mlx_parallm.extras.tinker import route, server
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend

NAME = CARD.name


class Client:
    """A client with a session and a model, as the SDK makes them."""

    def __init__(self, http: httpx.AsyncClient, policies: FakePolicies, engine: FakeEngine, services: Any) -> None:
        self.http, self.policies, self.engine, self.services = http, policies, engine, services
        self.session = self.model = ""

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        response = await self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def result(self, request_id: str, status: int = 200) -> dict[str, Any]:
        while True:
            body = {"request_id": request_id, "allow_metadata_only": True}
            answer = await self.post("retrieve_future", body, status)
            if answer.get("type") != "try_again":
                return answer

    async def ask(self, path: str, /, **body: Any) -> dict[str, Any]:
        return await self.result((await self.post(path, {"model_id": self.model, **body}))["request_id"])

    async def start(self) -> None:
        said = {"tags": [], "user_metadata": {}, "sdk_version": "0.24.1", "type": "create_session"}
        self.session = (await self.post("create_session", said))["session_id"]
        self.model = (await self.result((await self.create_model())["request_id"]))["model_id"]

    async def create_model(self, number: int = 0, **lora: Any) -> dict[str, Any]:
        lora = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": NAME, "lora_config": lora}
        return await self.post("create_model", {**body, "type": "create_model"})


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with client_of(ServerConfig(max_batch_size=4, max_queued=4)) as client:
        yield client


@asynccontextmanager
async def client_of(config: ServerConfig) -> AsyncIterator[Client]:
    """A client of a server over fakes."""
    policies, engine = FakePolicies(), FakeEngine()
    limits = TinkerConfig(max_sessions=3)
    training = FakeTraining(tinker=TinkerServer(policies, CARD, limits))
    app = create_app(Backend(engine, FakeAdapters(), OneModel(ByteTokenizer(), CARD), config, training))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        yield Client(http, policies, engine, app.state.services)


def tensor(*values: float, dtype: str = "float32") -> dict[str, Any]:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def datum(tokens: list[int], **inputs: dict[str, Any]) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": tokens[:1]}, {"type": "encoded_text", "tokens": tokens[1:]}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


DATA = [datum([1, 2], target_tokens=tensor(2, 3, dtype="int64"), weights=tensor(0.0, 1.0))]
SAMPLED = [
    datum(
        [1, 2, 3],
        target_tokens=tensor(0, 3, 4, dtype="int64"),
        logprobs=tensor(0.0, -1.0, -2.0),
        advantages=tensor(0.0, 0.5, 0.5),
    )
]


def imitated(number: int | None, data: list[Any] = DATA, **more: Any) -> dict[str, Any]:
    given = {"data": data, "loss_fn": "cross_entropy", **more}
    return {"forward_backward_input": given} | ({} if number is None else {"seq_id": number})


ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


async def test_a_model_is_created_trained_saved_and_sampled(client: Client) -> None:
    await client.start()
    scored = await client.ask("forward_backward", **imitated(1))
    assert scored["loss_fn_outputs"] == [{"logprobs": {"data": [-0.5, -0.5], "dtype": "float32", "shape": [2]}}]
    assert scored["metrics"] == {"loss:sum": 1.5}
    stepped = await client.ask("optim_step", seq_id=2, adam_params=ADAM, type="optim_step")
    assert stepped["metrics"] == {"grad_norm": 2.0, "update": 1}
    saved = await client.ask("save_weights", seq_id=3, path="one", overwrite=False, type="save_weights")
    assert saved["path"] == f"tinker://{client.model}/weights/one"
    loaded = await client.ask("load_weights", seq_id=4, path=saved["path"], optimizer=True, type="load_weights")
    assert loaded["path"] == saved["path"]
    sampler = await client.ask("save_weights_for_sampler", seq_id=5, sampling_session_seq_id=0)
    assert sampler["path"] is None
    adapter = client.model.replace(":train:", "-")
    assert client.policies.kinds == ["create", "forward_backward", "step", "save", "restore", "publish"]
    assert client.policies.calls[1][2:] == (
        [TargetedTokens((1, 2), (2, 3), (0.0, 1.0))],
        SummedLoss(TokenLoss.CROSS_ENTROPY),
    )
    assert client.policies.calls[4] == ("restore", adapter, adapter, "weights-one", True)
    drawn = await client.result((await client.post("asample", sampling(sampler["sampling_session_id"])))["request_id"])
    assert drawn["sequences"] == [{"stop_reason": "stop", "tokens": list(b"Hi \xc3\xa4!"), "logprobs": [-0.5] * 6}] * 2
    assert client.services.gate.held == 0


def sampling(sampler: str, **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 9, "seed": 3, "temperature": 0.7, "top_k": -1, "top_p": 0.9}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    body = {"num_samples": 2, "prompt": prompt, "sampling_params": params, "sampling_session_id": sampler, "seq_id": 0}
    return {**body, "prompt_logprobs": False, "topk_prompt_logprobs": 0, "type": "sample", **more}


async def test_the_alpha_is_32_and_the_layers_are_those_asked_for(client: Client) -> None:
    await client.start()
    await client.result((await client.create_model(1, rank=2, seed=7, train_mlp=False))["request_id"])
    spec = client.policies.calls[-1][2]
    assert (spec.rank, spec.alpha, spec.seed) == (2, 32.0, 7)
    assert (spec.layers.attention, spec.layers.mlp, spec.layers.head) == (True, False, True)


async def test_requests_run_in_the_order_of_their_numbers(client: Client) -> None:
    await client.start()
    last = await client.post("optim_step", {"model_id": client.model, "seq_id": 3, "adam_params": ADAM})
    second = await client.post("forward_backward", {"model_id": client.model, **imitated(2, SAMPLED)})
    await asyncio.sleep(0.02)
    assert client.policies.kinds == ["create"]
    first = await client.post("forward_backward", {"model_id": client.model, **imitated(1)})
    for each in (last, second, first):
        await client.result(each["request_id"])
    assert client.policies.kinds == ["create", "forward_backward", "step"], "the second has arrays of another loss"
    assert "advantages" in (await client.result(second["request_id"]))["error"]


async def test_a_repeated_request_runs_once_and_another_one_with_its_number_is_refused(client: Client) -> None:
    await client.start()
    body = {"model_id": client.model, "seq_id": 1, "adam_params": ADAM}
    once, again = await client.post("optim_step", body), await client.post("optim_step", body)
    assert once == again
    assert (await client.result(once["request_id"]))["metrics"]["update"] == 1
    assert await client.post("optim_step", body) == once, "also when it has ended"
    other = {**body, "adam_params": {**ADAM, "learning_rate": 1e-3}}
    assert "seq_id" in (await client.post("optim_step", other, 409))["error"]["message"]
    assert client.policies.steps == {client.model.replace(":train:", "-"): 1}
    assert await client.create_model() == {"request_id": f"{client.model}:0", "model_id": client.model}
    assert client.policies.kinds.count("create") == 1


async def test_a_result_that_is_not_there_yet_is_to_be_asked_for_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "POLL_S", 0.02)
    await client.start()
    client.policies.hold.clear()
    asked = (await client.post("forward_backward", {"model_id": client.model, **imitated(1)}))["request_id"]
    pending = await client.post("retrieve_future", {"request_id": asked})
    assert pending == {"type": "try_again", "request_id": asked, "queue_state": "active"}
    client.policies.hold.set()
    assert "metrics" in await client.result(asked)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (imitated(1, loss_fn="dro"), "cross_entropy, importance_sampling, ppo, cispo"),
        (imitated(1, loss_fn_config={"clip_low_threshold": 0.5}), "clip_low_threshold"),
        (imitated(1, []), "data"),
        (imitated(1, SAMPLED), "advantages"),
        (imitated(1, [datum([1, 2], weights=tensor(1.0, 1.0))]), "target_tokens"),
        (imitated(1, [datum([1, 2], target_tokens=tensor(2, dtype="int64"))]), "shape [1]"),
        (imitated(1, [datum([1, 2], target_tokens={**tensor(2, 3, dtype="int64"), "shape": [1, 2]})]), "[1, 2]"),
        (imitated(1, [datum([1, 2], target_tokens=tensor(2, CARD.vocab_size, dtype="int64"))]), "vocabulary"),
        (imitated(1, [datum([1, 2], target_tokens=tensor(2, -1, dtype="int64"))]), "negative"),
        (imitated(1, [datum([1] * 3000, target_tokens=tensor(*[1] * 3000, dtype="int64"))]), "context"),
        (imitated(1, [{"model_input": {"chunks": [{"type": "image", "data": ""}]}, "loss_fn_inputs": {}}]), "chunks"),
        ({"seq_id": 1, "forward_backward_input": {"data": 3}}, "data"),
    ],
)
async def test_a_mistake_fails_the_request_and_not_those_after_it(
    client: Client, body: dict[str, Any], told: str
) -> None:
    await client.start()
    failed = await client.ask("forward_backward", **body)
    assert failed["category"] == "user"
    assert told in failed["error"]
    assert (await client.ask("optim_step", seq_id=2, adam_params=ADAM))["metrics"]["update"] == 1


@pytest.mark.parametrize(
    ("loss", "config", "bounds"),
    [
        ("importance_sampling", {}, (0.0, 0.0)),
        ("ppo", {}, (0.8, 1.2)),
        ("cispo", {}, (0.0, 4.0)),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, (0.9, 1.5)),
    ],
)
async def test_the_bounds_of_a_loss(
    client: Client, loss: str, config: dict[str, float], bounds: tuple[float, float]
) -> None:
    await client.start()
    given = {"data": SAMPLED, "loss_fn": loss, "loss_fn_config": config}
    await client.ask("forward", seq_id=1, forward_input=given)
    _, _, sequences, asked = client.policies.calls[-1]
    assert asked == SummedLoss(TokenLoss(loss), *bounds)
    assert sequences == [TargetedTokens((1, 2, 3), (0, 3, 4), (0.0, 0.5, 0.5), (0.0, -1.0, -2.0))]


async def test_the_clients_mistakes_and_the_servers_are_told_apart(client: Client) -> None:
    await client.start()
    for error, category in ((InvalidRequestError("no"), "user"), (EngineError("/secret"), "server")):
        client.policies.error = error
        failed = await client.ask("forward_backward", **imitated(1 if category == "user" else 2))
        assert failed["category"] == category
        assert "/secret" not in failed["error"]


async def test_a_silent_client_leaves_nothing_behind(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SWEEP_S", 0.02)
    await client.start()
    client.policies.hold.clear()
    client.engine.pause_before = 2
    await client.post("forward_backward", {"model_id": client.model, **imitated(1)})
    await client.post("optim_step", {"model_id": client.model, "seq_id": 2, "adam_params": ADAM})
    sampler = (
        await client.post(
            "create_sampling_session", {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": NAME}
        )
    )["sampling_session_id"]
    await client.post("asample", sampling(sampler))
    await client.engine.paused.wait()
    assert client.services.gate.held == 2
    (session,) = client.services.extra("tinker").sessions
    session.seen_at -= 299
    await client.post("session_heartbeat", {"session_id": client.session, "type": "session_heartbeat"})
    session.seen_at -= 299
    await asyncio.sleep(0.05)
    assert client.policies.steps, "it has been heard of less than 300 s ago"
    session.seen_at -= 2
    while client.policies.steps:
        await asyncio.sleep(0.02)
    assert client.policies.running == 0
    assert "step" not in client.policies.kinds
    assert client.services.gate.held == 0
    assert not client.engine.live
    assert (
        len(client.services.extra("tinker").futures)
        == client.services.extra("tinker").futures.waiting_bytes.total()
        == 0
    )
    await client.post("session_heartbeat", {"session_id": client.session}, 410)
    await client.post("optim_step", {"model_id": client.model, "seq_id": 3, "adam_params": ADAM}, 410)


async def test_a_session_can_be_ended_and_there_are_not_too_many(client: Client) -> None:
    await client.start()
    for _ in range(2):
        await client.post("create_session", {})
    assert "max_sessions" in (await client.post("create_session", {}, 429))["error"]["message"]
    await client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}, "detail": None})
    await asyncio.sleep(0.01)
    assert client.policies.kinds[-1] == "close"
    await client.post("create_session", {})


async def test_an_unloaded_model_is_gone_and_its_session_stays(client: Client) -> None:
    await client.start()
    await client.post("unload_model", {"model_id": client.model})
    await asyncio.sleep(0.01)
    assert not client.policies.steps
    await client.post("optim_step", {"model_id": client.model, "seq_id": 1, "adam_params": ADAM}, 410)
    assert (await client.result((await client.create_model(1))["request_id"]))["model_id"].endswith(":train:1")


async def test_options_of_sampling_reach_the_engine(client: Client) -> None:
    await client.start()
    made = {"session_id": client.session, "sampling_session_seq_id": 4, "base_model": NAME}
    sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
    body = sampling(sampler, prompt_logprobs=True, topk_prompt_logprobs=2)
    asked = await client.post("asample", body)
    assert asked == {"request_id": f"{sampler}:0", "sample_sequence_ids": [f"{sampler}:0:0", f"{sampler}:0:1"]}
    answer = await client.result(asked["request_id"])
    assert answer["prompt_logprobs"] == [None, -0.5]
    assert answer["topk_prompt_logprobs"] == [None, [[6, -0.5], [7, -1.5]]]
    assert await client.post("asample", body) == asked
    last = {**body, "seq_id": 1, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "prompt_logprobs_last_n": 1}
    answer = await client.result((await client.post("asample", last))["request_id"])
    assert answer["prompt_logprobs"] == [None, None, -0.5]
    request, _ = client.engine.requests
    assert (request.n, request.prompts, request.prompt_logprobs) == (2, ((5, 6),), 2)
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.7, 0, 0.9, 3)
    assert client.services.gate.held == 0


@pytest.mark.parametrize(
    ("stop", "texts", "ids", "ignores_eos"),
    [
        (None, (), (), False),
        ([], (), (), True),
        ("ab", ("ab",), (), False),
        (["a"], ("a",), (), False),
        ([7, 8], (), (7, 8), False),
    ],
)
async def test_stops(
    client: Client, stop: Any, texts: tuple[str, ...], ids: tuple[int, ...], ignores_eos: bool
) -> None:
    await client.start()
    params = {"max_tokens": 2, "stop": stop}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    body = {"prompt": prompt, "sampling_params": params, "base_model": NAME}
    await client.result((await client.post("asample", body))["request_id"])
    stopping = client.engine.requests[-1].stopping
    assert (stopping.stop, stopping.stop_token_ids, stopping.ignore_eos) == (texts, ids, ignores_eos)


async def test_a_full_queue_and_what_is_not_supported_are_refused(client: Client) -> None:
    await client.start()
    base = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}, "base_model": NAME}
    assert (await client.post("asample", {**base, "num_samples": 9}, 400))["error"]["param"] == "n"
    with client.services.gate.reserve(client.services.gate.limit):
        assert (await client.post("asample", base, 429))["error"]["code"] == "rate_limit_exceeded"
    for field, value in (("prompt_alt_tokens_k", 2), ("record_stability_info", True), ("topk_prompt_logprobs", 21)):
        assert field in (await client.post("asample", {**base, field: value}, 400))["error"]["message"]
    assert NAME in (await client.post("asample", {**base, "base_model": "other"}, 404))["error"]["message"]
    path = f"tinker://{client.model}/weights/none"
    await client.post("asample", {**base, "model_path": path}, 404)
    await client.post("asample", {**base, "model_path": "tinker://../weights/x"}, 400)
    assert client.services.gate.held == 0


async def test_what_is_saved_is_listed_and_a_model_is_made_from_it(client: Client) -> None:
    await client.start()
    await client.ask("save_weights", seq_id=1, path="one")
    await client.ask("save_weights_for_sampler", seq_id=2, path="two")
    run = (await client.http.get(f"/api/v1/training_runs/{client.model}")).json()
    assert run["last_checkpoint"]["tinker_path"] == f"tinker://{client.model}/weights/one"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/two"
    listed = (await client.http.get(f"/api/v1/training_runs/{client.model}/checkpoints")).json()["checkpoints"]
    assert [each["checkpoint_type"] for each in listed] == ["training", "sampler"]
    info = await client.post("weights_info", {"tinker_path": listed[0]["tinker_path"]})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == (NAME, 4, True)
    body = {"session_id": client.session, "model_seq_id": 1, "path": listed[0]["tinker_path"], "optimizer": True}
    asked = await client.post("load_weights", body)
    assert (await client.result(asked["request_id"]))["model_id"] == f"{client.session}:train:1"
    assert client.policies.kinds[-1] == "create_from"


async def test_protobuf_needs_the_package(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.optional_packages.Extra.installed", False)
    await client.start()
    headers = {"content-type": "application/x-protobuf"}
    response = await client.http.post("/api/v1/forward_backward", content=b"", headers=headers)
    assert response.status_code == 415
    assert "mlx-parallm[tinker]" in response.json()["error"]["message"]
    asked = (await client.post("forward_backward", {"model_id": client.model, **imitated(1)}))["request_id"]
    accepts = {"accept": "application/x-protobuf, application/json"}
    answer = await client.http.post("/api/v1/retrieve_future", json={"request_id": asked}, headers=accepts)
    assert answer.headers["content-type"] == "application/json"


async def test_a_key_leaves_sessions_and_models_to_the_others(tmp_path: Path) -> None:
    """At most four for each that stays free, of three sessions and four models."""
    file, sent = key_file(tmp_path, mine="train", other="train")
    async with client_of(ServerConfig(keys_file=file)) as client:
        client.http.headers = sent["mine"]
        await client.start()
        models = [await client.result((await client.create_model(number))["request_id"]) for number in (1, 2, 3)]
        assert [each["type"] for each in models[:2]] == ["create_model"] * 2
        assert "max_models" in models[2]["error"]
        await client.post("create_session", {})
        assert "max_sessions" in (await client.post("create_session", {}, 429))["error"]["message"]
        client.http.headers = sent["other"]
        await client.start()
        assert client.model


@pytest.mark.parametrize("bound", ["MAX_FUTURES", "MAX_WAITING_BYTES"])
async def test_a_key_leaves_operations_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    file, sent = key_file(tmp_path, mine="train", other="train")
    async with client_of(ServerConfig(keys_file=file)) as client:
        models = {}
        for name in ("mine", "other"):
            client.http.headers = sent[name]
            await client.start()
            models[name] = client.model

        async def status(name: str, number: int) -> int:
            client.http.headers = sent[name]
            body = json.dumps({"model_id": models[name], **imitated(number)}).ljust(2000)
            headers = {"content-type": "application/json"}
            sending = client.http.post("/api/v1/forward_backward", content=body, headers=headers)
            return (await sending).status_code

        client.policies.hold.clear()
        monkeypatch.setattr(f"mlx_parallm.extras.tinker.futures.{bound}", 8 if bound == "MAX_FUTURES" else 14_000)
        taken = [await status("mine", number) for number in range(1, 9)]
        assert taken == sorted(taken)
        assert {*taken} == {200, 429}
        assert await status("other", 1) == 200
        client.http.headers = sent["mine"]  # an operation without data needs no room for it
        step = {"model_id": models["mine"], "adam_params": ADAM, "seq_id": 20}
        await client.post("optim_step", step, 429 if bound == "MAX_FUTURES" else 200)
        client.policies.hold.set()


@pytest.mark.parametrize("path", ["forward", "forward_backward"])
async def test_a_loss_is_charged_to_the_key(tmp_path: Path, path: str) -> None:
    file, sent = key_file(tmp_path, mine=("train", {"tokens_per_minute": 5, "requests_per_minute": 4}))
    async with client_of(ServerConfig(keys_file=file)) as client:
        client.http.headers = sent["mine"]
        await client.start()
        data = {"data": DATA, "loss_fn": "cross_entropy"}
        tokens = sum(len(chunk["tokens"]) for datum in DATA for chunk in datum["model_input"]["chunks"])
        asked = [{"model_id": client.model, f"{path}_input": data, "seq_id": number} for number in (1, 2, 3, 4)]
        served = 0
        for body in asked:
            response = await client.http.post(f"/api/v1/{path}", json=body)
            if response.status_code == 429:
                assert "tokens a minute" in response.json()["error"]["message"]
                break
            await client.result(response.json()["request_id"])
            await client.post(path, body)  # sent again, it is not charged again
            served += 1
        assert served == -(-5 // tokens)
        usage = (await client.http.get("/v1/usage")).json()["data"][0]
        assert (usage["requests"], usage["prompt_tokens"], usage["running"]) == (served, served * tokens, 0)
