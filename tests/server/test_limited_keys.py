"""What a key may see, use and change of another's: each cell of the table in docs/keys.md, over the real app.

`acme` is limited to the adapters `acme*`, `free` is not limited; both have the role train. The adapter `globex` and the
default adapter `policy` are others'.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from protocols.fake_policies import FakePolicies
from protocols.test_tinker import imitated, sampling
from server.fake_control import COMPARISON
from server.fakes import CARD, ByteTokenizer
from server.keys import key_file
from server.one_model import OneModel

from mlx_parallm.adapters.cards import AdapterStats, CheckpointCard
from mlx_parallm.config import TinkerConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.models import BaseStatus, ModelState
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.atropos.trajectory_api import Registration
from mlx_parallm.extras.people.service import FoundTrajectory
from mlx_parallm.extras.reward_models.folder import no_reward_model
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.rl.status import TrainingEvent, TrainingStatus
from mlx_parallm.rl.trajectories import TrajectoryGroup
from mlx_parallm.server import entry
from mlx_parallm.server.access import Role, new_key

MESSAGES = [{"role": "user", "content": "x"}]
LIMITED = {"adapters": ("acme*",)}


def trajectory(adapter, owner):
    name = f"of-{adapter}-{'other' if owner is None else owner or 'server'}"
    return Trajectory(
        name, name, 1, AdapterRef(adapter, 1), (1,), (2,), (-0.5,), 1.0, "text", FinishReason.STOP,
        CollectionSpec(), 1_800_000_000.0, owner=owner,
    )  # fmt: skip


@pytest.fixture
async def server(tmp_path, make_client, adapters, training, competition):
    """A server over fakes. `server.ask(key, method, path, body)` → the response."""
    for name in ("acme-1", "globex", "policy"):
        adapters.publish(name)
        adapters.saved.append(CheckpointCard("checkpoint-1", AdapterRef(name, 1), 1, "", 1))
    adapters.state = AdapterStats(slots=4, running=("acme-1", "globex"), waiting=("policy",))
    trained = ("policy", "acme-1", "globex")
    training.state = {name: TrainingStatus(state="idle", adapter=name, trained=trained) for name in trained}
    competition.known = {
        name: replace(COMPARISON, adapter=name, live=AdapterRef(name, 2), candidate=AdapterRef(name, 1))
        for name in ("acme-1", "globex")
    }
    training.found |= {"of-globex": FoundTrajectory("globex", (1,), (2,), "b")}
    for name in ("acme-1", "globex"):
        for owner in ("acme", "free", "mine", ""):
            training.buffer.add(TrajectoryGroup(name, [trajectory(name, owner)]))
    limits = {
        "acme": ("train", LIMITED),
        "asker": ("inference", LIMITED),
        "based": ("inference", {"adapters": ("acme*", "base")}),
        "teacher": ("train", {"adapters": ("acme*", "base")}),
        "free": "train",
        "boss": "admin",
        "mine": "train",
    }
    file, sent = key_file(tmp_path, **limits)
    registration = Registration(32, CARD.context_length, "", 10, 0, 10**9, "", "")
    audit_log = tmp_path / "audit.jsonl"
    async with make_client(atropos=registration, keys_file=file, audit_log=audit_log, ollama_api=True) as client:
        training.extras["tinker"] = TinkerServer(FakePolicies(), CARD, TinkerConfig())

        async def ask(key, method, path, body=None):
            return await client.request(method, path, json=body, headers=sent[key])

        yield SimpleNamespace(
            ask=ask, adapters=adapters, training=training, competition=competition, app=client.app, folder=tmp_path
        )


# -- the table -------------------------------------------------------------------------------------

GONE = "it does not exist"
"""The answer is that for a name or id that there never was."""
DOCS = Path(__file__).parents[2] / "docs" / "keys.md"
IN_SESSION = {"session_id": "{session}", "base_model": CARD.name}
OF_MODEL = {"model_id": "{session}:train:0", "seq_id": 2}
WEIGHTS = "tinker://{session}:train:0/weights/a"
LESSON_BODY = {"prompts": ["x"], "reward": {"word": "y"}, "lora_adapter": "globex"}

# Of each row of the table: the requests, and what they are answered to a key without a limit, to one for other
# adapters, and to an admin's. `{response}`, `{session}` and `{env}` are what the key `mine` has made.
TABLE = {
    "stored responses": [
        ("GET", "/v1/responses/{response}", None, (GONE, GONE, 200)),
        ("GET", "/v1/responses/{response}/input_items", None, (GONE, GONE, 200)),
        (
            "POST",
            "/v1/responses",
            {"input": "x", "previous_response_id": "{response}", "model": "acme-1"},
            (GONE, GONE, 200),
        ),
        ("DELETE", "/v1/responses/{response}", None, (GONE, GONE, 200)),
    ],
    "usage": [("GET", "/v1/usage", None, ("no mine", "no mine", "mine"))],
    "metrics": [
        ("GET", "/metrics", None, ("mine", "no mine", "mine")),
        ("GET", "/metrics", None, ("globex", "no globex", "globex")),
    ],
    "adapters and their checkpoints": [
        ("GET", "/v1/adapters", None, ("globex", "no globex", "globex")),
        ("GET", "/v1/checkpoints", None, ("globex", "no globex", "globex")),
        ("POST", "/v1/completions", {"prompt": "x", "model": "globex"}, (200, GONE, 200)),
        ("POST", "/v1/training/checkpoint", {"lora_name": "globex"}, (200, GONE, 200)),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "plain", "lora_path": "plain"}, (200, GONE, 200)),
        ("DELETE", "/v1/adapters/globex@1", None, (200, GONE, 200)),
    ],
    "folders of adapters, by path": [
        ("POST", "/v1/completions", {"prompt": "x", "adapters": "./globex"}, (200, GONE, 200)),
    ],
    "training of an adapter: status, history, events, comparisons, lessons": [
        ("GET", "/v1/training/status?lora_adapter=globex", None, (200, GONE, 200)),
        ("GET", "/v1/training/history?lora_adapter=globex", None, (200, GONE, 200)),
        ("GET", "/v1/training/compare", None, ("globex", "no globex", "globex")),
        ("POST", "/v1/training/pause", {"lora_adapter": "globex"}, (200, GONE, 200)),
        ("POST", "/v1/training/lesson", LESSON_BODY, (200, GONE, 200)),
    ],
    "the route of unnamed requests": [
        ("POST", "/v1/adapters/route", {"weights": {"acme-1": 1}}, (200, 403, 200)),
    ],
    "collected answers, edits, groups and episodes": [
        ("GET", "/v1/training/trajectories/of-globex-mine", None, (GONE, GONE, 200)),
        ("GET", "/v1/training/trajectories/of-acme-1-mine", None, (GONE, GONE, 200)),
        ("GET", "/v1/training/trajectories", None, ("no -mine", "no -mine", "-mine")),
    ],
    "answers that the server has sampled for tasks of its own": [
        ("GET", "/v1/training/trajectories/of-globex-server", None, (200, GONE, 200)),
        ("GET", "/v1/training/trajectories/of-acme-1-server", None, (200, 200, 200)),
    ],
    "groups from Atropos and other programs": [
        ("GET", "/v1/training/trajectories/of-globex-other", None, (GONE, GONE, 200)),
    ],
    "Atropos environments": [("POST", "/disconnect-env", {"env_id": "{env}"}, (GONE, GONE, GONE))],
    "Tinker sessions, models, samplers, saved weights and results": [
        ("GET", "/api/v1/sessions/{session}", None, (GONE, GONE, 200)),
        ("GET", "/api/v1/training_runs", None, ("no {session}", "no {session}", "{session}")),
        ("POST", "/api/v1/get_info", {"model_id": "{session}:train:0"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/optim_step", {"model_id": "{session}:train:0", "seq_id": 2}, (GONE, GONE, 200)),
        ("POST", "/api/v1/session_heartbeat", {"session_id": "{session}"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/create_model", {**IN_SESSION, "model_seq_id": 1}, (GONE, GONE, 200)),
        ("POST", "/api/v1/create_sampling_session", {**IN_SESSION, "sampling_session_seq_id": 1}, (GONE, GONE, 200)),
        (
            "POST",
            "/api/v1/forward",
            {**OF_MODEL, "forward_input": imitated(2)["forward_backward_input"]},
            (GONE, GONE, 200),
        ),
        ("POST", "/api/v1/forward_backward", {**OF_MODEL, **imitated(2)}, (GONE, GONE, 200)),
        ("POST", "/api/v1/save_weights", {**OF_MODEL, "path": "two"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/save_weights_for_sampler", {**OF_MODEL, "path": "two"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/load_weights", {**OF_MODEL, "path": WEIGHTS, "optimizer": True}, (GONE, GONE, 200)),
        ("POST", "/api/v1/unload_model", {"model_id": "{session}:train:0"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/asample", sampling("{session}:sample:0"), (GONE, GONE, 200)),
        ("POST", "/api/v1/asample", sampling("", model_path=WEIGHTS, sampling_session_id=None), (GONE, GONE, 200)),
        ("GET", "/api/v1/training_runs/{session}:train:0", None, (GONE, GONE, 200)),
        ("GET", "/api/v1/training_runs/{session}:train:0/checkpoints", None, ("no weights", "no weights", "weights")),
        ("GET", "/api/v1/samplers/{session}:sample:0", None, (GONE, GONE, 200)),
        ("POST", "/api/v1/retrieve_future", {"request_id": "{session}:train:0:0"}, (GONE, GONE, 200)),
        ("POST", "/api/v1/weights_info", {"tinker_path": "tinker://{session}:train:0/weights/a"}, (GONE, GONE, 200)),
    ],
    "versions that Tinker has published, as adapters": [
        ("GET", "/v1/models", None, ("{session}", "no {session}", "{session}")),
        ("POST", "/v1/completions", {"prompt": "x", "model": "{session}-0"}, (200, GONE, 200)),
        ("GET", "/v1/checkpoints", None, ("no {session}", "no {session}", "{session}")),
        ("DELETE", "/v1/adapters/{session}-0@1", None, (403, GONE, 200)),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "{session}-0"}, (403, GONE, 200)),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "{session}-0", "lora_path": "acme-1"}, (403, GONE, 400)),
        ("POST", "/v1/adapters/rollback", {"lora_name": "{session}-0"}, (403, GONE, 409)),
        ("POST", "/v1/training/checkpoint", {"lora_name": "{session}-0"}, (403, GONE, 200)),
        ("POST", "/v1/training/start", {"lora_adapter": "{session}-0"}, (GONE, GONE, 200)),
    ],
}
CELLS = [
    pytest.param(row, *request, column, expected, id=f"{row}: {request[0]} {request[1]} as {column}")
    for row, requests in TABLE.items()
    for *request, cells in requests
    for column, expected in zip(("free", "acme", "boss"), cells, strict=True)
]


def test_the_table_of_the_docs_has_these_rows():
    table = DOCS.read_text().partition("| what | another key |")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == [*TABLE]


async def made_by_mine(server):
    """What the key `mine` makes, by the name that stands for it in the table."""

    async def made(path, /, **body):
        return (await server.ask("mine", "POST", path, body)).json()

    response = (await made("/v1/responses", input="x", model="acme-1"))["id"]
    await made("/v1/completions", prompt="x", model="globex")
    session = (await made("/api/v1/create_session"))["session_id"]
    of_session = {"session_id": session, "base_model": CARD.name}
    future = (await made("/api/v1/create_model", **of_session, model_seq_id=0))["request_id"]
    await made("/api/v1/retrieve_future", request_id=future)
    await made("/api/v1/create_sampling_session", **of_session, sampling_session_seq_id=0)
    saving = await made("/api/v1/save_weights", model_id=f"{session}:train:0", seq_id=1, path="a")
    await made("/api/v1/retrieve_future", request_id=saving["request_id"])
    server.adapters.saved.append(CheckpointCard("checkpoint-7", server.adapters.publish(f"{session}-0"), 7, "", 1))
    env = await made("/register-env", max_token_length=64, desired_name="a", weight=1.0, group_size=2)
    server.training.buffer.add(TrajectoryGroup("globex", [trajectory("globex", None)]))
    return {"{response}": response, "{session}": session, "{env}": str(env["env_id"])}


def never_made(ids):
    """Ids of the same form that nothing has."""
    session = "tinker-" + "0" * (len(ids["{session}"]) - 7)
    return {"{response}": "resp_none", "{session}": session, "{env}": "7", "globex": "nobody", "-mine": "-none"}


@pytest.mark.parametrize(("row", "method", "path", "body", "key", "expected"), CELLS)
async def test_each_cell_of_the_table(server, row, method, path, body, key, expected):
    ids = await made_by_mine(server)

    async def ask(names):
        text = json.dumps([path, body])
        for name, value in names.items():
            text = text.replace(name, value)
        response = await server.ask(key, method, *json.loads(text))
        shown = response.text
        for name, value in names.items():
            shown = shown.replace(value, name)
        return response.status_code, shown

    status, text = await ask(ids)
    if isinstance(expected, int):
        assert status == expected, text
    elif expected is GONE:
        assert (status, text) == await ask(ids | never_made(ids)), text
        assert status in (404, 410) or "no environment" in text
    else:
        assert status == 200
        assert (expected.removeprefix("no ") in text) is not expected.startswith("no ")


# -- a name ----------------------------------------------------------------------------------------

USES = {
    "completions: model": ("POST", "/v1/completions", {"model": "{}", "prompt": "x"}),
    "completions: lora_adapter": ("POST", "/v1/completions", {"lora_adapter": "{}", "prompt": "x"}),
    "completions: adapters": ("POST", "/v1/completions", {"adapters": "{}", "prompt": "x"}),
    "completions: with the base model": (
        "POST",
        "/v1/completions",
        {"model": CARD.name, "adapters": "{}", "prompt": "x"},
    ),
    "completions: streamed": ("POST", "/v1/completions", {"model": "{}", "prompt": "x", "stream": True}),
    "chat": ("POST", "/v1/chat/completions", {"model": "{}", "messages": MESSAGES}),
    "chat: tokens": ("POST", "/v1/chat/completions/tokens", {"model": "{}", "messages": MESSAGES, "tokens": [1]}),
    "chat: render": ("POST", "/v1/chat/completions/render", {"model": "{}", "messages": MESSAGES}),
    "messages": ("POST", "/v1/messages", {"model": "{}", "messages": MESSAGES, "max_tokens": 2}),
    "messages: count": ("POST", "/v1/messages/count_tokens", {"model": "{}", "messages": MESSAGES}),
    "responses": ("POST", "/v1/responses", {"model": "{}", "input": "x"}),
    "responses: input_tokens": ("POST", "/v1/responses/input_tokens", {"model": "{}", "input": "x"}),
    "embeddings": ("POST", "/v1/embeddings", {"model": "{}", "input": "x"}),
    "score": ("POST", "/v1/score", {"model": "{}", "text_1": "x", "text_2": "y"}),
    "rerank": ("POST", "/v1/rerank", {"model": "{}", "query": "x", "documents": ["y"]}),
    "ollama: chat": ("POST", "/api/chat", {"model": "{}", "messages": MESSAGES, "stream": False}),
    "ollama: generate": ("POST", "/api/generate", {"model": "{}", "prompt": "x", "stream": False}),
    "ollama: embed": ("POST", "/api/embed", {"model": "{}", "input": "x"}),
    "ollama: one embedding": ("POST", "/api/embeddings", {"model": "{}", "prompt": "x"}),
    "ollama: show": ("POST", "/api/show", {"model": "{}"}),
    "tokenize": ("POST", "/tokenize", {"model": "{}", "prompt": "x"}),
    "detokenize": ("POST", "/detokenize", {"model": "{}", "tokens": [1]}),
    "a model": ("GET", "/v1/models/{}", None),
    "an adapter": ("GET", "/v1/adapters/{}", None),
    "vllm: generate": (
        "POST",
        "/inference/v1/generate",
        {"model": "{}", "token_ids": [1], "sampling_params": {"max_tokens": 1}},
    ),
}
CHANGES = {
    "load": ("POST", "/v1/load_lora_adapter", {"lora_name": "{}", "lora_path": "acme-1", "load_inplace": True}),
    "unload": ("POST", "/v1/unload_lora_adapter", {"lora_name": "{}"}),
    "delete": ("DELETE", "/v1/adapters/{}", None),
    "roll back": ("POST", "/v1/adapters/rollback", {"lora_name": "{}"}),
    "checkpoint": ("POST", "/v1/training/checkpoint", {"lora_name": "{}"}),
    "update": ("POST", "/v1/training/update", {"lora_adapter": "{}"}),
    "start": ("POST", "/v1/training/start", {"lora_adapter": "{}"}),
    "stop": ("POST", "/v1/training/stop", {"lora_adapter": "{}"}),
    "pause": ("POST", "/v1/training/pause", {"lora_adapter": "{}"}),
    "resume": ("POST", "/v1/training/resume", {"lora_adapter": "{}"}),
    "training rollback": ("POST", "/v1/training/rollback", {"lora_adapter": "{}"}),
    "status": ("GET", "/v1/training/status?lora_adapter={}", None),
    "history": ("GET", "/v1/training/history?lora_adapter={}", None),
    "why": ("GET", "/v1/training/why?version={}", None),
    "why this": ("POST", "/v1/training/why", {"version": "{}", "prompt": "x", "completion": "y"}),
    "report": ("GET", "/v1/training/report?lora_adapter={}", None),
    "compare": ("POST", "/v1/training/compare", {"lora_adapter": "{}", "candidate": "x"}),
    "compare with": ("POST", "/v1/training/compare", {"lora_adapter": "acme-1", "candidate": "{}@1"}),
    "stop comparing": ("POST", "/v1/training/compare/stop", {"lora_adapter": "{}"}),
    "average": ("POST", "/v1/training/average", {"adapters": ["acme-1", "{}"], "lora_adapter": "acme-2"}),
    "average as": ("POST", "/v1/training/average", {"adapters": ["acme-1", "acme-1"], "lora_adapter": "{}"}),
    "edit": ("POST", "/v1/training/preference", {"prompt": "x", "correction": "y", "lora_adapter": "{}"}),
    "given version": (
        "POST",
        "/v1/training/update",
        {"lora_adapter": "acme-1", "trajectories": [{"prompt": "x", "output": "y", "reward": 1, "lora_version": "{}"}]},
    ),
    "lesson": ("POST", "/v1/training/lesson", {"prompts": ["x"], "reward": {"word": "y"}, "lora_adapter": "{}"}),
}


async def answer(server, key, row, name):
    method, path, body = json.loads(json.dumps(row).replace("{}", name))
    response = await server.ask(key, method, path, body)
    return response.status_code, response.text.replace(name, "NAME")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("spelling", ["globex", "globex@1"])
async def test_to_a_limited_key_other_adapters_do_not_exist(server, use, spelling):
    status, text = await answer(server, "asker", use, spelling)
    assert status == 404, text
    assert (status, text) == await answer(server, "asker", use, "nobody"), "it is told the same of a name that is none"
    assert "policy" not in text
    assert (await answer(server, "asker", use, "acme-1"))[0] == 200
    assert (await answer(server, "free", use, spelling))[0] == 200, "without a limit, all adapters are everybody's"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_limited_key_changes_only_its_own_adapters(server, change):
    server.training.found.clear()
    status, text = await answer(server, "acme", change, "globex")
    assert status == 404, text
    assert server.training.calls == server.competition.asked == []
    assert "globex" in {ref.name for ref in server.adapters.known}
    own = (await answer(server, "acme", change, "acme-1"))[0]
    assert own in (200, 409), "409: the fakes have nothing to go back to, or it is in training"
    assert (await answer(server, "free", change, "globex"))[0] == own


# -- the base model, and requests that name nothing -------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/load_lora_adapter"])
async def test_a_run_does_not_lead_to_an_adapter_that_the_key_does_not_see(server, path):
    """The folder has a name that the key sees, and means a checkpoint of another adapter."""

    async def folder_of(path):
        return path.replace("acme-run", "acme-run/globex/checkpoint-3")

    server.adapters.folder_of = folder_of
    body = {"prompt": "x", "adapters": "./acme-run"}
    if path == "/v1/load_lora_adapter":
        body = {"lora_name": "acme-2", "lora_path": "./acme-run"}
    refused = await server.ask("acme", "POST", path, body)
    assert (refused.status_code, "globex" in refused.text) == (404, False)
    assert (await server.ask("free", "POST", path, body)).status_code == 200


class TwoModels(OneModel):
    """`acme-2` is an adapter of the base model `second`. `used`: the base models that were asked for, in order."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.used = []

    @property
    def names(self):
        return self.first.names | {"second"}

    def find(self, *names):
        return "second" if {"second", "acme-2"} & set(names) else self.first.card.name

    def statuses(self):
        return (*super().statuses(), BaseStatus("second", ModelState.IDLE, adapters=("acme-2",)))

    @asynccontextmanager
    async def use(self, base):
        self.used.append(base)
        yield self.first


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions/render", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/api/show", {}),
        ("/api/generate", {"prompt": "x", "stream": False}),
    ],
)
async def test_a_base_model_is_loaded_for_keys_that_may_use_it(server, path, body):
    models = TwoModels(ByteTokenizer(), CARD)
    server.app.state.services = replace(server.app.state.services, models=models)
    refused = await server.ask("asker", "POST", path, body | {"model": "second"})
    unknown = await server.ask("asker", "POST", path, body | {"model": "nobody"})
    assert (refused.status_code, refused.text) == (404, unknown.text.replace("nobody", "second"))
    assert "second" not in models.used
    for key in ("based", "free"):
        await server.ask(key, "POST", path, body | {"model": "second"})
        assert models.used.pop() == "second"


async def test_reward_models_are_named_like_adapters(server):
    body = {"text_1": "x", "text_2": "y"}
    for name, status in (("globex", 400), ("acme-judge", 200)):
        sent = {**body, "model": f"reward_model:{name}"}
        answer = await server.ask("asker", "POST", "/v1/score", sent)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["message"] == str(no_reward_model(name)), "as of a name that is none"
        assert (await server.ask("free", "POST", "/v1/score", sent)).status_code == 200


@pytest.mark.parametrize("model", ["base", CARD.name, "base-model", None])
async def test_the_base_model_is_an_adapter_called_base(server, model):
    body = {"prompt": "x"} | ({} if model is None else {"model": model})
    assert (await server.ask("asker", "POST", "/v1/completions", body)).status_code == 404
    assert (await server.ask("based", "POST", "/v1/completions", body)).status_code == 200
    if model is not None:
        assert (await server.ask("asker", "POST", "/tokenize", {"model": model, "prompt": "x"})).status_code == 404
        assert (await server.ask("asker", "GET", f"/v1/models/{model}")).status_code == 404
        assert (await server.ask("based", "GET", f"/v1/models/{model}")).status_code == 200


async def test_requests_that_name_nothing_get_the_route_if_the_key_sees_all_of_it(server):
    for shares, status in (
        ({"acme-1": 1.0}, 200),
        ({"acme-1": 0.5, "globex@1": 0.5}, 404),
        ({"globex": 1.0}, 404),
    ):
        server.adapters.shares = shares
        response = await server.ask("asker", "POST", "/v1/completions", {"prompt": "x"})
        assert response.status_code == status
        assert "globex" not in response.text
        route = (await server.ask("asker", "GET", "/v1/adapters/route")).json()["route"]
        assert route == {name: share for name, share in shares.items() if "acme" in name}


async def test_answers_of_the_base_model_are_collected_for_keys_that_see_the_default_adapter(server):
    body = {"prompt": "x", "model": "base", "collect_trajectory": True}
    refused = await server.ask("teacher", "POST", "/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "collect_trajectory")
    assert "policy" not in refused.text
    assert (await server.ask("teacher", "POST", "/v1/completions", body | {"model": "acme-1"})).status_code == 200
    assert (await server.ask("free", "POST", "/v1/completions", body)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/adapters/route", {"weights": {"acme-1": 1}}),
        ("POST", "/v1/model/switch-lora", {"version": "acme-1"}),
        ("DELETE", "/v1/adapters/route", None),
        ("POST", "/v1/adapters/rollback", {}),
        ("POST", "/v1/training/reward_model", {"name": "acme-judge"}),
    ],
)
async def test_what_concerns_all_adapters_is_not_for_a_limited_key(server, method, path, body):
    response = await server.ask("acme", method, path, body)
    assert response.status_code == 403
    assert "all keys" in response.json()["error"]["message"]
    assert (await server.ask("free", method, path, body)).status_code in (200, 409)


# -- what is listed --------------------------------------------------------------------------------

LISTS = [
    "/v1/models",
    "/v1/adapters",
    "/v1/checkpoints",
    "/api/tags",
    "/api/ps",
    "/v1/stats",
    "/server_info",
    "/metrics",
    "/v1/usage",
    "/v1/training/compare",
    "/v1/training/lesson",
    "/v1/training/trajectories",
    "/v1/training/status?lora_adapter=acme-1",
]


@pytest.mark.parametrize("path", LISTS)
async def test_lists_have_only_what_the_key_sees(server, path):
    for name in ("acme-1", "globex"):
        await server.ask("boss", "POST", "/v1/completions", {"model": name, "prompt": "x"})
    await server.ask("boss", "POST", "/v1/training/lesson", {"prompts": ["x"], "reward": {"word": "y"}})
    seen, every = [(await server.ask(key, "GET", path)) for key in ("acme", "boss")]
    assert (seen.status_code, every.status_code) == (200, 200), seen.text
    shown = "".join(line for line in seen.text.splitlines() if not line.startswith("#"))
    for name in ("globex", "policy", '"boss"'):
        assert name not in shown
    if path not in ("/server_info", "/v1/usage", "/v1/training/lesson", "/api/ps"):
        assert "acme" in seen.text
        assert "globex" in every.text


async def test_the_report_of_what_was_learnt_names_no_other_key(server):
    whole, seen = [(await server.ask(key, "GET", "/v1/training/report")).json()["keys"] for key in ("boss", "free")]
    assert [(each["whose"], each["key"]) for each in whole] == [("key", "ann"), ("key", "boss"), ("server", None)]
    assert [(each["whose"], each["key"], each["share"]) for each in seen] == [
        *(("key", "free", 0.25), ("server", None, 0.25), ("others", None, 0.5)),
    ]


async def test_a_lesson_for_another_adapter_is_neither_shown_nor_stopped(server):
    await server.ask("boss", "POST", "/v1/training/lesson", {"prompts": ["x"], "reward": {"word": "y"}})
    assert (await server.ask("acme", "GET", "/v1/training/lesson")).json()["lesson"] is None
    stopped = await server.ask("acme", "DELETE", "/v1/training/lesson")
    assert (stopped.status_code, stopped.json()["error"]["message"]) == (409, "No lesson runs.")
    own = {"prompts": ["x"], "reward": {"word": "y"}, "lora_adapter": "acme-1"}
    assert "policy" not in (await server.ask("acme", "POST", "/v1/training/lesson", own)).text


async def test_the_stream_of_events_has_those_of_seen_adapters(server):
    told = [
        TrainingEvent("update", 1.0, {"adapter": "globex"}, "1"),
        TrainingEvent("averaged", 1.0, {"adapter": "acme-1", "adapters": ["acme-1@1", "globex@1"]}, "2"),
        TrainingEvent("update", 1.0, {"adapter": "acme-1"}, "3"),
        None,
    ]
    for event in told:
        server.training.told.put_nowait(event)
    text = (await server.ask("acme", "GET", "/v1/training/events")).text
    assert "acme-1" in text
    assert "globex" not in text


async def test_the_stream_of_events_says_nothing_of_other_keys_groups(server):
    def of(key, group_id):
        data = {"adapter": "acme-1", "group_id": group_id, "key": key}
        server.training.told.put_nowait(TrainingEvent("collected", 1.0, data))

    for key in ("acme", "free", "boss"):
        for owner, group_id in (("mine", "hidden-1"), (None, "hidden-2"), ("", "open"), (key, "own")):
            of(owner, group_id)
        updating = {"adapter": "acme-1", "groups": ["hidden-1"], "trajectories": 1}
        server.training.told.put_nowait(TrainingEvent("updating", 1.0, updating))
        server.training.told.put_nowait(None)
        text = (await server.ask(key, "GET", "/v1/training/events")).text
        assert all(word in text for word in ("own", "open", "updating"))
        assert [word in text for word in ("hidden", '"mine"', '"key"')] == [key == "boss"] * 3


# -- by a path -------------------------------------------------------------------------------------


async def test_to_load_an_adapter_by_its_path_needs_the_role_train(server):
    body = {"prompt": "x", "adapters": "some/acme-1"}
    for key in ("asker", "based"):
        refused = await server.ask(key, "POST", "/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_role")
        assert refused.json()["error"]["param"] == "adapters"
    assert server.adapters.folders == []
    assert (await server.ask("free", "POST", "/v1/completions", body)).status_code == 200
    assert (await server.ask("free", "POST", "/v1/completions", body)).status_code == 200
    lines = [json.loads(line) for line in (server.folder / "audit.jsonl").read_text().splitlines()]
    assert [(line["key"], line["path"], line["status"]) for line in lines] == [
        ("asker", "/v1/completions", 403),
        ("based", "/v1/completions", 403),
        ("free", "/v1/completions", 200),
    ], "what is loaded already is no control action"


@pytest.mark.parametrize("path", ["old/globex", "acme-1/../globex", "globex/checkpoint-3", "/adapters/globex/", ".."])
async def test_a_limited_key_reads_no_other_adapters_folder(server, path):
    named = {"lora_name": "acme-2", "lora_path": path}
    assert (await server.ask("acme", "POST", "/v1/load_lora_adapter", named)).status_code == 404
    by_path = {"prompt": "x", "adapters": f"./{path}"}
    assert (await server.ask("acme", "POST", "/v1/completions", by_path)).status_code == 404
    assert server.adapters.folders == []
    assert "acme-2" not in {ref.name for ref in server.adapters.known}


# -- names of trained adapters ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy", "policy@7", "globex"])
async def test_the_name_of_an_adapter_in_training_is_reserved(server, name):
    body = {"lora_name": name, "lora_path": "some/folder", "load_inplace": True}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        response = await server.ask("free", "POST", path, body)
        assert response.status_code == 409
        assert "another name" in response.json()["error"]["message"]


# -- the key itself --------------------------------------------------------------------------------


def test_an_admin_key_cannot_be_limited():
    with pytest.raises(ConfigError, match="an admin key may do everything"):
        new_key("boss", Role.ADMIN, adapters=("acme*",))
    for wrong in ((), ("a b",), ("",), ("x" * 65,)):
        with pytest.raises(ConfigError, match="adapters"):
            new_key("app", Role.TRAIN, adapters=wrong)


async def test_one_key_has_a_limited_number_of_control_actions_under_way(server, monkeypatch):
    monkeypatch.setattr(entry, "MAX_CHANGES", 2)
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def unload(selector, base=None):
        begun.release()
        await go_on.wait()
        return (AdapterRef(selector, 1),)

    server.adapters.unload = unload
    async with asyncio.TaskGroup() as group:
        under_way = [group.create_task(server.ask("free", "DELETE", "/v1/adapters/globex@1")) for _ in range(2)]
        for _ in under_way:
            await begun.acquire()
        refused = await server.ask("free", "DELETE", "/v1/adapters/globex@1")
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert (await server.ask("free", "GET", "/v1/adapters")).status_code == 200, "what changes nothing goes on"
        under_way.append(group.create_task(server.ask("mine", "DELETE", "/v1/adapters/globex@1")))
        await begun.acquire()
        go_on.set()
    assert [task.result().status_code for task in under_way] == [200] * 3
    assert (await server.ask("free", "DELETE", "/v1/adapters/globex@1")).status_code == 200


async def test_names_in_errors_are_those_that_the_key_sees(server):
    for key, seen in {"asker": {"acme-1"}, "based": {"acme-1", "base"}}.items():
        message = (await server.ask(key, "POST", "/v1/completions", {"model": "nobody", "prompt": "x"})).json()
        listed = message["error"]["message"].partition("there are ")[2].partition(":")[0].split(", ")
        assert seen == set(listed) - {CARD.name, "base-model"}
