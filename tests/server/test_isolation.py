"""What one client sends must not keep the others waiting: where work is done, and how much one may ask for."""

import asyncio
import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.asking import events_in, refusal
from server.keys import key_file

from mlx_parallm.errors import OverloadedError
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.server import body as bodies
from mlx_parallm.server import generation, limits
from mlx_parallm.server.limits import ArrivingBodies, PerClientSemaphore

URL, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE_S = 30


def from_address(app, address):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


# ---- bodies ------------------------------------------------------------------------------------


@pytest.fixture
def parsing_threads(monkeypatch):
    """Which threads have parsed the JSON of a body."""
    threads, parse = [], bodies.from_json

    def recorded(*raw, **options):
        threads.append(threading.current_thread())
        return parse(*raw, **options)

    monkeypatch.setattr(bodies, "from_json", recorded)
    return threads


async def test_large_bodies_are_parsed_beside_the_event_loop(client, parsing_threads):
    for text in ("x", "x" * 200_000):
        assert (await client.post("/tokenize", json={"prompt": text})).status_code in (200, 400)
    assert [thread is threading.main_thread() for thread in parsing_threads] == [True, False]


@pytest.mark.parametrize("value", ["1", '"a"', "{}", "[]", '{"a":1}'])
async def test_a_body_of_very_many_values_is_not_parsed(make_client, parsing_threads, value):
    client = make_client(max_body_bytes=2**20)
    raw = '{"prompt":[' + ",".join([value] * 100_000) + "]}"
    error = await refusal(
        client.post(URL, content=raw, headers={"content-type": "application/json"}), 413, code="body_too_large"
    )
    assert "values" in error["message"]
    assert not parsing_threads


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",[{\\\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='a"\\,', max_size=3), inner, max_size=4)
    ),
    max_leaves=25,
)


def values_in(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_in, inner))


def empty_in(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (value in ([], {})) + sum(map(empty_in, inner))


@given(JSON)
@settings(deadline=None)
def test_values_are_counted_without_parsing(value):
    """But for the outermost one; an empty list or object counts twice."""
    counted = bodies.count_values(json.dumps(value).encode(), enough=10**9)
    assert counted == values_in(value) - 1 + empty_in(value)


async def test_slow_large_bodies_hold_up_nobody(make_client, tmp_path):
    """From two addresses with one key, and from one address with two keys."""
    file, sent = key_file(tmp_path, greedy="inference", other="inference")
    app = make_client(keys_file=file).app
    never = asyncio.Event()

    async def endless():
        yield b'{"prompt":'
        await never.wait()

    headers = {"content-type": "application/json", **sent["greedy"]}
    async with from_address(app, "10.0.0.1") as one, from_address(app, "10.0.0.2") as two:
        held = [asyncio.create_task(client.post(URL, content=endless(), headers=headers)) for client in (one, two) * 20]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            large = {"prompt": "x" * 100_000}
            assert (await one.post("/tokenize", json=large, headers=sent["other"])).status_code == 400
            assert (await one.post("/tokenize", json=large, headers=sent["greedy"])).status_code == 400
        for task in held:
            task.cancel()
        await asyncio.wait(held)


# ---- answers -----------------------------------------------------------------------------------


# ---- grammars ----------------------------------------------------------------------------------


@pytest.fixture
def bombs(monkeypatch):
    """`bombs.set()` lets the grammars end whose source has `bomb` in it; until then they take for ever."""
    ended, compile_grammar = threading.Event(), LLCompiler.compile

    def slow(compiler, spec, new=True):
        if new and "bomb" in spec.source:
            assert ended.wait(60)
        return compile_grammar(compiler, spec, new)

    monkeypatch.setattr(LLCompiler, "compile", slow)
    yield ended
    ended.set()


async def test_grammars_of_one_client_keep_nobody_waiting(make_client, bombs):
    app = make_client().app
    async with from_address(app, "10.0.0.1") as bomber, from_address(app, "10.0.0.2") as other:
        held = [
            asyncio.create_task(bomber.post(URL, json={"prompt": "x", "guided_regex": f"bomb{i}"})) for i in range(60)
        ]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            assert (await bomber.post(URL, json={"prompt": "x"})).status_code == 200
            assert (await other.post(URL, json={"prompt": "x"})).status_code == 200
            assert (await other.post(URL, json={"prompt": "x", "guided_regex": "fine"})).status_code == 200
        bombs.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}


async def test_a_known_grammar_waits_for_none_that_is_compiled(make_client, bombs):
    """Two clients hold all places."""
    app, known = make_client().app, {"prompt": "x", "guided_regex": "fine"}
    async with from_address(app, "10.0.0.1") as one, from_address(app, "10.0.0.2") as two:
        assert (await one.post(URL, json=known)).status_code == 200
        held = [
            asyncio.create_task(each.post(URL, json={"prompt": "x", "guided_regex": "bomb" + str(i)}))
            for i, each in enumerate((one, two))
        ]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            assert (await one.post(URL, json=known)).status_code == 200
        bombs.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}


async def test_a_grammar_waits_for_its_clients_others_only_so_long(make_client, bombs, monkeypatch):
    monkeypatch.setattr(limits, "_GRAMMAR_TIMEOUT_S", 0.1)
    client = make_client()
    first = asyncio.create_task(client.post(URL, json={"prompt": "x", "guided_regex": "bomb1"}))
    await asyncio.sleep(0.02)
    await refusal(client.post(URL, json={"prompt": "x", "guided_regex": "bomb2"}), 429, code="rate_limit_exceeded")
    bombs.set()
    assert (await first).status_code == 200
    assert client.app.state.services.gate.held == 0


@pytest.fixture
async def pauses(monkeypatch):
    """The pauses of large bodies on a clock that stands still."""
    found = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)
    return found


async def test_clients_with_many_connections_leave_an_equal_share_of_the_rate_to_another(pauses):
    """Two of them, with 400 chunks that have arrived each: the chunk of a third client does not queue behind those."""
    arriving, chunk = ArrivingBodies(10**12), 64 * 2**10
    with arriving.hold("a") as one, arriving.hold("b") as other, arriving.hold("c") as third:
        for _ in range(400):
            await one(chunk)
            await other(chunk)
        pauses.clear()
        await third(chunk)
    assert pauses == [3 * chunk / limits._LARGE_BODY_BYTES_PER_S]


async def test_long_events_say_what_short_ones_do(client, monkeypatch):
    """Their texts are made beside the event loop."""
    body = {"prompt": "abc", "stream": True, "max_tokens": 2, "logprobs": 1}
    short = events_in(await client.post(URL, json=body))
    monkeypatch.setattr(generation, "SMALL_BYTES", 0)
    long = events_in(await client.post(URL, json=body))
    assert [event["choices"] for event in short] == [event["choices"] for event in long]


async def test_places_are_shared_and_given_back():
    share = PerClientSemaphore(total=1, per_client=1, timeout_s=0.05, busy="busy")
    for other in ("a", "b"):  # its own place is taken, and that of all clients
        async with share.hold("a"):
            with pytest.raises(OverloadedError, match="busy"):
                await share.hold(other).__aenter__()
        async with share.hold(other):
            pass
