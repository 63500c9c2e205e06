"""What each role may do, on every route of the app."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from server.asking import fault, refusal
from server.fake_control import FakeAdapters, FakeTraining
from server.fakes import CARD, ByteTokenizer, FakeEngine
from server.keys import key_file
from server.one_model import OneModel
from starlette.responses import Response
from starlette.routing import Route

from mlx_parallm.config import ServerConfig
from mlx_parallm.extras.atropos.route import AtroposParts
from mlx_parallm.extras.atropos.trajectory_api import Registration
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend

pytestmark = pytest.mark.ci

ROLES = ("inference", "train", "admin")
FORBIDDEN = {
    "inference": {
        *("POST /pause", "POST /resume", "POST /sleep", "POST /wake_up", "POST /reset_prefix_cache"),
        *("POST /v1/load_lora_adapter", "POST /load_lora_adapter", "POST /v1/unload_lora_adapter"),
        *("POST /v1/model/switch-lora", "POST /v1/adapters/route", "POST /v1/adapters/rollback"),
        *("DELETE /v1/adapters/{selector:path}", "DELETE /v1/adapters/route", "POST /v1/training/checkpoint"),
        *("POST /v1/training/update", "POST /v1/training/rollback", "POST /v1/training/pause"),
        *("POST /v1/training/feedback", "POST /v1/training/schedule", "POST /api/v1/optim_step"),
        *("GET /debug/state", "GET /debug/training", "GET /debug/trajectories", "GET /latest_example"),
        *("GET /v1/training/lesson", "POST /v1/training/lesson", "DELETE /v1/training/lesson"),
        *("GET /v1/training/events", "GET /api/v1/sessions", "POST /scored_data"),
    },
    "train": {
        *("POST /pause", "POST /resume", "POST /sleep", "POST /wake_up", "POST /reset_prefix_cache"),
        *("POST /v1/training/schedule", "GET /debug/state", "GET /debug/training", "GET /debug/trajectories"),
        *("GET /latest_example", "GET /api/v1/sessions"),
    },
    "admin": set(),
}


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
SPELLINGS = (
    "{}",
    "{}\n",
    "{}\n/",
    "\n{}",
    "{}\r",
    "{}\r\n",
    "{}\x00",
    "{}\x0b",
    "{}\x85",
    "{}\u2028",
    "{} ",
    "{}\u00a0",
    "{}/",
    "{}//",
    "/{}",
    "/.{}",
    "/x/..{}",
    "{}/.",
    "{};x",
    "{}?x",
    "{}#x",
    "{}%0A",
    "http://127.0.0.1{}",
)
"""Of a path, decoded once, as the server gets them."""
CONTROL = re.compile(r"[\n\r\x00\x0b\x85\u2028]")


class Answers(dict):
    """What a response was, sent to it as ASGI messages."""

    async def __call__(self, message):
        self |= message


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return key_file(tmp_path_factory.mktemp("keys"), **{role: role for role in ROLES})


@pytest.fixture
def app(keys, tmp_path, monkeypatch):
    """The app that serves everything, with its middlewares. In the place of what its routes do, `app.state.ran` gets
    the method and the path of the route."""
    config = ServerConfig(keys_file=keys[0], ollama_api=True, audit_log=tmp_path / "audit.jsonl", access_log=False)
    registration = Registration(32, 64, "/runs/one", 10, 0, 10**9, "run-1", "mlx-parallm")
    training, model = FakeTraining(), OneModel(ByteTokenizer(), CARD)
    training.extras["atropos"] = AtroposParts.of(registration, training, training, CARD)
    app = create_app(Backend(FakeEngine(), FakeAdapters(), model, config, training))
    app.state.ran = []
    for route in app.router.routes:
        monkeypatch.setattr(route, "app", partial(ran, app.state.ran))
    return app


async def ran(routes, scope, receive, send):
    routes.append((scope["method"], scope["route"].path if "route" in scope else scope["path"]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
def routes(app):
    """(method, path) of every route, HEAD apart, which is answered as GET."""
    return [(method, route.path) for route in app.router.routes for method in route.methods if method != "HEAD"]


async def call(app, method, path, headers, kind="http"):
    """The answer of the whole app, and the routes that it ran."""
    app.state.ran.clear()
    answer = Answers()
    sent = [(b"host", b"127.0.0.1"), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "scheme": "http",
        "query_string": b"",
        "headers": sent,
        "client": None,
    }
    await app(scope, nothing, answer)
    return answer, list(app.state.ran)


async def nothing():
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("role", [None, *ROLES])
async def test_no_spelling_of_a_path_lets_a_role_do_more(app, routes, keys, role):
    """A role may run exactly the routes that need it or a lower one, whatever stands in the place of a parameter."""
    headers = {} if role is None else keys[1][role]
    may = {
        (method, route.path)
        for route in app.router.routes
        for method in route.methods
        if route.access.role is None or (role is not None and ROLES.index(role) >= ROLES.index(route.access.role))
    }
    refused = set()
    for method, pattern in routes:
        path = re.sub(r"{\w+(:path)?}", "x", pattern)
        answer, did = await call(app, method, path, headers)
        if (method, pattern) in may:
            assert did == [(method, pattern)], (method, path)
            continue
        assert (answer["status"], did) == (401 if role is None else 403, []), (method, path)
        refused.add(f"{method} {pattern}")
    assert refused >= FORBIDDEN.get(role, set())
    assert bool(refused) is (role != "admin")
    methods = defaultdict(set)
    for method, pattern in routes:
        methods[re.sub(r"{\w+(:path)?}", "x", pattern)].add(method)
    for path, of_path in methods.items():
        for spelling, method in [("{}", method) for method in METHODS] + list(product(SPELLINGS, of_path)):
            answer, did = await call(app, method, spelling.format(path), headers)
            assert set(did) <= may, (method, spelling, path)
            assert did or answer["status"] in (400, 401, 403, 404, 405), (method, spelling, path)
            assert not (did and CONTROL.search(spelling)), (method, spelling, path)
        answer, did = await call(app, "GET", path, headers, "websocket")
        assert (answer["type"], did) == ("websocket.close", []), path


async def test_refused_control_actions_are_in_the_audit_log(app, routes, keys):
    for method, path in ("POST", "/pause"), ("POST", "/pause/"), ("POST", "/sleep"), ("GET", "/reset_data"):
        await call(app, method, path, keys[1]["inference"])
        line = json.loads(app.state.services.config.audit_log.read_text().splitlines()[-1])
        assert (line["key"], line["path"], line["status"]) == ("inference", path, 403)


async def test_a_route_that_is_not_declared_needs_admin(app, keys):
    app.router.routes.append(Route("/new/{name}", Response, methods=["POST"]))
    app.router.routes[-1].app = partial(ran, app.state.ran)
    for role, expected in (("train", 403), ("admin", 200)):
        assert (await call(app, "POST", "/new/thing", keys[1][role]))[0]["status"] == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
async def test_priority_beyond_the_bound_of_the_key(make_client, tmp_path, engine, path):
    file, sent = key_file(
        tmp_path,
        app="inference",
        late=("inference", {"least_priority": 3}),
        boss="admin",
        soon=("train", {"least_priority": -5}),
    )
    client = make_client(keys_file=file)
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    }
    for name, priority, expected in (
        ("app", -1, 403),
        ("app", 0, 200),
        ("late", 2, 403),
        ("late", 3, 200),
        ("soon", -5, 200),
        ("soon", -6, 403),
        ("boss", -1000, 200),
    ):
        answer = await client.post(path, headers=sent[name], json={**bodies[path], "priority": priority})
        assert answer.status_code == expected, (name, priority, answer.text)
        if expected == 403:
            assert fault(answer)["param"] == "priority"
    assert [request.priority for request in engine.requests] == [0, 3, -5, -1000]


async def test_collecting_needs_the_role_train(make_client, tmp_path, engine):
    file, sent = key_file(tmp_path, app="inference", trainer="train")
    client = make_client(keys_file=file)
    body = {"prompt": "x", "collect_trajectory": True}
    await refusal(client.post("/v1/completions", headers=sent["app"], json=body), 403, param="collect_trajectory")
    assert not engine.requests
    assert (await client.post("/v1/completions", headers=sent["trainer"], json=body)).status_code == 200


async def test_paths_of_this_machine_are_shown_to_keys_that_may_name_one(make_client, tmp_path, adapters, monkeypatch):
    file, sent = key_file(tmp_path, app="inference", trainer="train")
    adapters.publish("math")
    cards = tuple(replace(card, root="/adapters/x") for card in adapters.cards())
    monkeypatch.setattr(adapters, "cards", lambda: cards)
    client = make_client(card=replace(CARD, tokenizer="/models/x"), keys_file=file)
    for key, shown in (("app", False), ("trainer", True)):
        info = (await client.get("/server_info", headers=sent[key])).json()
        assert bool(info["model"]["tokenizer"]) is shown
        for listing in "/v1/adapters", "/v1/models":
            data = (await client.get(listing, headers=sent[key])).json()["data"]
            assert any(each["root"].startswith("/") for each in data) is shown
