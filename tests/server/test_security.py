"""Who is let in: keys, hosts, origins."""

import pytest
from server.asking import refusal
from starlette.routing import Route

from mlx_parallm.server import app

pytestmark = pytest.mark.ci

KEY = "sk-test-key"
BODY = {"prompt": "x"}


def bearer(key):
    return {"authorization": b"Bearer " + key.encode()}


def all_routes(client):
    """(method, path) of everything the app's document and router know."""
    documented = {(method.upper(), path) for path, item in client.app.openapi()["paths"].items() for method in item}
    routes = [*client.app.routes, *(route for routes in app.all_routes() for route in routes.router.routes)]
    routed = {(method, route.path) for route in routes if isinstance(route, Route) for method in route.methods}
    return documented | routed


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer(KEY[:-1]),
        bearer("kéy"),
        bearer("sk-tést-kéy"),
        {"authorization": b"Bearer \xff\xfe"},
        {"authorization": "Basic " + "eDp5"},
        {"authorization": "Bearer"},
    ],
    ids=str,
)
async def test_wrong_keys(make_client, headers):
    await refusal(
        make_client(api_key=KEY).post("/v1/completions", json=BODY, headers=headers), 401, code="invalid_api_key"
    )


async def test_the_right_key(make_client):
    client = make_client(api_key=KEY)
    for scheme in (b"Bearer ", b"bearer "):
        headers = {"authorization": scheme + KEY.encode()}
        assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "x@localhost", "", "[", "localhost/x"]
)
async def test_foreign_hosts(client, engine, host):
    routes = all_routes(client)
    assert len(routes) > 100
    for method, path in routes:
        response = await client.request(method, path, headers={"host": host})
        assert response.status_code == 403, (method, path)
    assert not engine.requests


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"])
async def test_own_hosts(client, host):
    assert (await client.get("/health", headers={"host": host})).status_code == 200


async def test_configured_hosts(make_client):
    for allowed in (("mac.local",), ("*",)):
        client = make_client(allowed_hosts=allowed)
        assert (await client.get("/health", headers={"host": "mac.local:8000"})).status_code == 200


async def test_20_foreign_origins_on_every_route(client, engine, adapters):
    """A page of another site can change no adapter and no schedule, send nothing to sleep, and read none of it."""
    adapters.publish("math")
    for method, path in all_routes(client):
        headers = {"origin": "http://evil.example", "content-type": "application/x-www-form-urlencoded"}
        response = await client.request(method, path, content=b"{}", headers=headers)
        assert response.status_code == 403, (method, path)
    assert not adapters.held.is_set()
    assert not engine.called.is_set()
    assert not adapters.asked


async def test_own_origin(client):
    response = await client.post("/v1/completions", json=BODY, headers={"origin": "http://localhost:8000"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_configured_origins_get_cors(make_client):
    client = make_client(cors_origins=("http://ui.example",), api_key=KEY)
    preflight = {"origin": "http://ui.example", "access-control-request-method": "POST"}
    answer = await client.options("/v1/completions", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://ui.example")
    preflight["access-control-request-method"] = "DELETE"
    assert (await client.options("/v1/adapters/math", headers=preflight)).status_code == 200
    refused = await client.post("/v1/completions", json=BODY, headers={"origin": "http://ui.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://ui.example")
    assert (await client.get("/health", headers={"origin": "http://other.example"})).status_code == 403
