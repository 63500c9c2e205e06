"""What each role may do, on every route of the app."""

import pytest
from server.fake_control import FakeAdapters, FakeTraining
from server.fakes import CARD, ByteTokenizer, FakeEngine
from server.keys import key_file
from server.one_model import OneModel

from mlx_parallm.config import ServerConfig
from mlx_parallm.rl.atropos.trajectory_api import Registration
from mlx_parallm.server.access.guard import Guard
from mlx_parallm.server.access.keys import KeyRing
from mlx_parallm.server.access.roles import OPEN_PATHS, ROUTES, RouteTable
from mlx_parallm.server.access.sessions import Sessions
from mlx_parallm.server.app import create_app
from mlx_parallm.server.http.middleware import routes_of
from mlx_parallm.server.http.request_log import RequestRecord

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


@pytest.fixture(scope="module")
def routes():
    """(method, path) of every route of an app that serves everything, HEAD apart, which is answered as GET."""
    parts = (FakeEngine(), FakeAdapters(), FakeTraining(), OneModel(ByteTokenizer(), CARD), ServerConfig())
    app = create_app(*parts, Registration(32, 64, "/runs/one", 10, 0, 10**9, "run-1", "mlx-parallm"))
    return [(method, path) for method, path in routes_of(app) if method != "HEAD"]


def test_every_route_has_its_role_declared(routes):
    assert RouteTable([route for route in routes if route[1] not in OPEN_PATHS]).undeclared == []


def test_no_role_is_declared_for_a_route_that_is_gone(routes):
    declared = {tuple(line.split()) for _, text in ROUTES for line in text.strip().splitlines()}
    assert declared <= set(routes)


def test_each_route_is_declared_once():
    lines = [line.strip() for _, text in ROUTES for line in text.strip().splitlines()]
    assert len(lines) == len(set(lines))


async def call(guard, method, path, headers):
    """The status and headers that the guard, or an app behind it that always answers 200, gives."""
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "state": {"record": RequestRecord()}}
    answer = {}

    async def send(message):
        answer.update(message)

    await guard(scope, None, send)
    return answer["status"], dict(answer["headers"])


def guard_of(file, routes):
    ring = KeyRing(file=file)
    return Guard(always, ring, Sessions(ring), RouteTable(routes))


async def always(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("role", ROLES)
async def test_the_matrix_of_roles_and_routes(tmp_path, routes, role):
    """A role may use exactly the routes that need it or a lower one, whatever stands in the place of a parameter."""
    file, sent = key_file(tmp_path, someone=role)
    guard = guard_of(file, routes)
    headers = [(name.encode(), value.encode()) for name, value in sent["someone"].items()]
    needs = {line.strip(): access.role for access, text in ROUTES for line in text.strip().splitlines()}
    refused = set()
    for method, path in routes:
        status, answered = await call(
            guard, method, path.replace("{", "x").replace("}", "y").replace(":", "z"), headers
        )
        if path in OPEN_PATHS:
            assert status == 200
            continue
        may = ROLES.index(role) >= ROLES.index(needs[f"{method} {path}"])
        assert status == (200 if may else 403), (method, path)
        if not may:
            assert answered[b"x-should-retry"] == b"false"
            refused.add(f"{method} {path}")
    assert refused >= FORBIDDEN[role]
    assert bool(refused) is (role != "admin")


async def test_a_route_that_is_not_declared_needs_admin(tmp_path):
    file, sent = key_file(tmp_path, small="train", great="admin")
    guard = guard_of(file, [("POST", "/new/{name}")])
    for name, expected in (("small", 403), ("great", 200)):
        headers = [(b"authorization", sent[name]["authorization"].encode())]
        assert (await call(guard, "POST", "/new/thing", headers))[0] == expected


async def test_the_answer_names_the_role_that_is_needed(make_client, tmp_path, fault, engine):
    file, sent = key_file(tmp_path, app="inference", trainer="train")
    client = make_client(keys_file=file)
    answer = await client.post("/pause", headers=sent["app"])
    assert (answer.status_code, fault(answer)["code"]) == (403, "insufficient_role")
    assert fault(answer)["message"] == "This needs a key with the role admin; the role of this key is inference."
    answer = await client.post("/v1/training/feedback", headers=sent["app"], json={})
    assert "the role train" in fault(answer)["message"]
    assert not engine.pauses


async def test_an_unknown_path_is_not_found_for_any_key(make_client, tmp_path):
    file, sent = key_file(tmp_path, app="inference")
    assert (await make_client(keys_file=file).get("/api/unknown", headers=sent["app"])).status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
async def test_priority_beyond_the_bound_of_the_key(make_client, tmp_path, fault, engine, path):
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


async def test_collecting_needs_the_role_train(make_client, tmp_path, fault, engine):
    file, sent = key_file(tmp_path, app="inference", trainer="train")
    client = make_client(keys_file=file)
    body = {"prompt": "x", "collect_trajectory": True}
    answer = await client.post("/v1/completions", headers=sent["app"], json=body)
    assert (answer.status_code, fault(answer)["param"]) == (403, "collect_trajectory")
    assert not engine.requests
    assert (await client.post("/v1/completions", headers=sent["trainer"], json=body)).status_code == 200
