"""People open the server's pages with their key: the cookie, and what it is good for."""

import pytest
from server.asking import fault
from server.keys import key_file
from starlette.datastructures import Headers

from mlx_parallm.server.access import (
    COOKIE,
    LIFETIME_S,
    MAX_SESSIONS,
    KeyRing,
    Sessions,
    read_keys,
    write_keys,
)

HTML = {"accept": "text/html,application/xhtml+xml"}
ORIGIN = {"origin": "http://localhost:8000"}
OWN_PAGE = {"sec-fetch-site": "same-origin"}


@pytest.fixture
def keyed(make_client, tmp_path):
    """A client of a server with one key, the key's secret, and the file of keys."""
    file, sent = key_file(tmp_path, me="inference")
    client = make_client(keys_file=file)
    client.secret, client.file = sent["me"]["authorization"].removeprefix("Bearer "), file
    return client


async def log_in(client, **form):
    answer = await client.post("/login", data={"key": client.secret, "next": "/docs", **form}, headers=ORIGIN)
    return answer, {"cookie": answer.headers.get("set-cookie", "").partition(";")[0]}


async def test_from_a_page_to_the_login_and_back(keyed):
    sent_away = await keyed.get("/docs", headers=HTML)
    assert (sent_away.status_code, sent_away.headers["location"]) == (303, "/login?next=/docs")
    assert (await keyed.get("/docs")).status_code == 401, "a program gets the error"
    assert (await keyed.get("/v1/models", headers=HTML)).status_code == 401
    page = await keyed.get("/login?next=/docs")
    assert page.status_code == 200
    assert "form-action 'self'" in page.headers["content-security-policy"]
    answer, cookie = await log_in(keyed)
    assert (answer.status_code, answer.headers["location"]) == (303, "/docs")
    flags = answer.headers["set-cookie"].lower().split("; ")[1:]
    assert {"httponly", "samesite=strict", "path=/", f"max-age={LIFETIME_S}"} == set(flags)
    assert keyed.secret not in str(answer.headers)
    assert (await keyed.get("/docs", headers=HTML | cookie)).status_code == 200
    assert (await keyed.get("/openapi.json", headers=OWN_PAGE | cookie)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "shown", "status"),
    [
        ("GET", "/docs", {"sec-fetch-site": "none"}, 200),
        ("GET", "/docs", {"sec-fetch-site": "same-site"}, 401),
        ("GET", "/docs", {"referer": "http://localhost:3000/x"}, 401),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/v1/models", {"sec-fetch-site": "none"}, 401),
        ("GET", "/v1/models", {"sec-fetch-site": "same-site"}, 403),
        ("GET", "/v1/models", {"sec-fetch-site": "cross-site"}, 403),
        ("GET", "/v1/models", {"referer": "http://localhost:3000/"}, 401),
        ("GET", "/v1/models", {"referer": "http://localhost:8000/docs"}, 200),
        ("GET", "/v1/models", {"sec-fetch-site": "same-origin"}, 200),
        ("POST", "/tokenize", {}, 401),
        ("POST", "/tokenize", {"origin": "http://localhost:8000"}, 200),
        ("POST", "/tokenize", {"origin": "http://localhost:3000"}, 403),
        ("POST", "/tokenize", {"origin": "null"}, 403),
    ],
)
async def test_the_cookie_counts_only_for_pages_and_what_they_ask(keyed, method, path, shown, status):
    _, cookie = await log_in(keyed)
    body = {"prompt": "x"} if method == "POST" else None
    assert (await keyed.request(method, path, json=body, headers=shown | cookie)).status_code == status


async def test_the_login_needs_an_origin_and_a_right_key(keyed):
    answer = await keyed.post("/login", data={"key": keyed.secret})
    assert (answer.status_code, fault(answer)["code"]) == (403, "forbidden_origin")
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        answer = await keyed.post("/login", data={"key": keyed.secret}, headers={"origin": origin})
        assert answer.status_code == 403
    for form in ({"key": "wrong"}, {"key": ""}, {"key": "x" * 5000}, {str(n): "x" for n in range(20)}):
        answer, _ = await log_in(keyed, **form)
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


async def test_wrong_keys_of_the_login_and_of_programs_are_limited_together(make_client):
    client = make_client(api_key="short")
    client.secret = "short"
    for number in range(5):
        assert (await log_in(client, key=f"guess {number}"))[0].status_code == 401
        assert (await client.get("/v1/models", headers=bearer(f"try {number}"))).status_code == 401
    answer, _ = await log_in(client)
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    for headers in (bearer("short"), {"x-api-key": "short"}, bearer("other")):
        refused = await client.get("/v1/models", headers=headers)
        assert refused.status_code == 429, "the next guess is not looked at"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await client.get("/v1/models", headers=bearer("try 1"))).status_code == 401


async def test_guesses_of_others_cost_no_right_key(make_client, tmp_path):
    """One that the address has sent before, or that nobody can guess."""
    file, sent = key_file(tmp_path, me="inference")
    client = make_client(keys_file=file, api_key="short")
    assert (await client.get("/v1/models", headers=bearer("short"))).status_code == 200
    for number in range(20):
        await client.get("/v1/models", headers=bearer(f"guess {number}"))
    assert (await client.get("/v1/models", headers=bearer("guess"))).status_code == 429
    for headers in (bearer("short"), sent["me"]):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_program_that_keeps_sending_an_old_key_makes_nobody_wait(make_client):
    client = make_client(api_key="short")
    for _ in range(100):
        assert (await client.get("/v1/models", headers=bearer("old"))).status_code == 401
    assert (await client.get("/v1/models", headers=bearer("short"))).status_code == 200


async def test_next_is_a_page_of_this_server(keyed):
    for page in ("https://evil.example", "//evil.example", "/v1/models", '"><script>'):
        assert (await log_in(keyed, next=page))[0].headers["location"] == "/"
        assert "evil" not in (await keyed.get("/login", params={"next": page})).text
        assert "<script" not in (await keyed.get("/login", params={"next": page})).text


async def test_a_session_ends(keyed):
    _, cookie = await log_in(keyed)
    left = await keyed.post("/logout", headers=ORIGIN | cookie)
    assert (left.status_code, left.headers["location"]) == (303, "/login")
    assert (await keyed.get("/docs", headers=cookie)).status_code == 401
    _, cookie = await log_in(keyed)
    write_keys(keyed.file, [])
    assert (await keyed.get("/docs", headers=cookie)).status_code == 401, "its key was removed"
    assert (await keyed.get("/docs", headers={"cookie": f"{COOKIE}=guess"})).status_code == 401


def test_sessions_expire_and_are_bounded(tmp_path):
    now = [0.0]
    file, _ = key_file(tmp_path, me="inference")
    sessions, (key,) = Sessions(KeyRing(file=file), lambda: now[0]), read_keys(file)
    cookies = [Headers({"cookie": f"{COOKIE}={sessions.open(key)}"}) for _ in range(MAX_SESSIONS + 1)]
    assert sessions.key_of(cookies[0]) is None
    assert sessions.key_of(cookies[1]) == key
    now[0] = LIFETIME_S - 1
    assert sessions.key_of(cookies[1]) == key
    now[0] = LIFETIME_S + 1
    assert sessions.key_of(cookies[1]) is None
