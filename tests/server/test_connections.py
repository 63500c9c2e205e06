"""What one client can hold of the server's connections, and for how long; on real sockets."""

import asyncio
import contextlib
import errno
import json
import resource
import subprocess
import sys

import httpx
import pytest
from server.asking import eventually
from server.keys import key_file

from mlx_parallm.core.requests import FinishReason, SequenceOutput
from mlx_parallm.server import connections
from mlx_parallm.server.api import login
from mlx_parallm.server.connections import OTHER_FILES, reserve_open_files

pytestmark = pytest.mark.ci

PATIENCE_S = 30
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


async def opened(server, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    await writer.drain()
    return reader, writer


async def refused(server, raw):
    """Status, headers and error of the answer to these bytes, after which the server closes."""
    reader, writer = await opened(server, raw)
    answer = await answer_of(reader)
    writer.close()
    return answer


async def answer_of(reader):
    """Status, headers and error of an answer after which the server closes."""
    raw = await asyncio.wait_for(reader.read(), PATIENCE_S)
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, json.loads(body)["error"]


async def test_headers_that_never_end_are_answered_and_closed(serving):
    async with serving(header_timeout=0.2) as server:
        status, head, error = await refused(server, BEGUN)
        assert (status, error["code"]) == (408, "header_timeout")
        assert b"connection: close" in head


async def test_a_drip_of_headers_does_not_restart_the_clock(serving):
    async with serving(header_timeout=0.3) as server:
        _, writer = await opened(server, BEGUN)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while server.uvicorn.server_state.connections:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)
        assert not server.uvicorn.server_state.connections


async def test_an_answer_may_take_longer_than_headers_and_body(serving, engine):
    engine.pause_before = 0
    short = serving(header_timeout=0.1, body_timeout=0.1)
    async with short as server, httpx.AsyncClient(base_url=server.url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await engine.paused.wait()
        await asyncio.sleep(0.4)
        engine.go_on.set()
        assert (await request).status_code == 200


@pytest.mark.parametrize("length", [20, 200_000], ids=["small", "large"])
async def test_a_body_that_never_ends_is_answered_and_closed(serving, engine, length):
    async with serving(body_timeout=0.2) as server:
        status, head, error = await refused(server, HEAD + f'Content-Length: {length}\r\n\r\n{{"prompt":'.encode())
        assert (status, error["code"]) == (408, "body_timeout")
        assert b"connection: close" in head
        assert not engine.requests


def endless(engine, text):
    """Makes every answer so long that no socket buffer holds it."""

    def events(request):
        for _ in range(4000):
            yield SequenceOutput(0, (65,), text)
        yield SequenceOutput(0, (65,), "", finish_reason=FinishReason.STOP)
        yield engine._finished(request, 4001)

    engine._events = events


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_disconnected_and_its_rows_are_free(serving, engine, metric, stream):
    endless(engine, "x" * 8000)
    async with serving(write_timeout=0.3) as server:
        raw = json.dumps({"prompt": "x", "stream": stream}).encode()
        _, writer = await opened(server, HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        gate = server.app.state.services.gate
        await eventually(lambda: engine.requests)
        await eventually(lambda: not server.uvicorn.server_state.connections)
        await eventually(lambda: not engine.live and gate.held == 0)
        writer.close()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert await metric(client, "mlx_parallm_client_disconnects_total") == stream


async def test_beyond_the_connections_that_are_busy_a_new_one_gets_503(serving, engine):
    engine.pause_before = 0
    async with serving(max_connections=2) as server:
        raw = json.dumps({"prompt": "x"}).encode()
        request = HEAD + f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw
        busy = [await opened(server, request) for _ in range(2)]
        await eventually(lambda: len(engine.live) == 2)
        status, head, error = await refused(server, b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (status, error["code"]) == (503, "too_many_connections")
        assert b"retry-after" in head
        for probe in ("/health", "/liveness", "/ready"):
            reader, writer = await opened(server, f"GET {probe} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert b"200 OK" in await asyncio.wait_for(reader.read(), PATIENCE_S), "answered, and then closed"
            writer.close()
        engine.go_on.set()
        for reader, writer in busy:
            assert b"200 OK" in await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after all have connected"])
async def test_each_connection_of_a_burst_is_answered(serving, engine, late):
    """Also one that had to make room for others before its request came."""
    engine.pause_before = 0
    raw = json.dumps({"prompt": "x"}).encode()
    request = HEAD + f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw
    async with serving(max_connections=4) as server:
        opening = [opened(server, b"" if late else request) for _ in range(40)]
        burst = await asyncio.gather(*opening)
        if late:
            await eventually(lambda: server.uvicorn.config.http.args[0].lingering == 36)
            for _, writer in burst:
                writer.write(request)
        await eventually(lambda: engine.live)
        engine.go_on.set()
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in burst)), PATIENCE_S)
        assert {answer.split()[1] for answer in answers} == {b"200", b"503"}
        for _, writer in burst:
            writer.close()


async def test_probes_come_before_the_requests_of_a_burst(serving, monkeypatch):
    """While requests wait to start, the server's health is answered."""
    monkeypatch.setattr(connections.PacedStarts, "_next", lambda starts: None)
    async with serving() as server:
        waiting = [await opened(server, b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") for _ in range(3)]
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            assert (await client.get("/health")).status_code == 200
        for reader, writer in waiting:
            assert not reader._buffer
            writer.close()


async def test_a_client_that_has_gone_when_it_is_refused_leaves_nothing(serving, monkeypatch, caplog):
    def gone(transport):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async with serving() as server:
        monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", gone)
        _, writer = await opened(server, b"garbage\r\n\r\n")
        limits = server.uvicorn.config.http.args[0]
        await eventually(lambda: limits.lingering == 1)
        writer.close()
        await eventually(lambda: limits.lingering == 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_failing_start_does_not_stop_those_of_others():
    starts, called = connections.PacedStarts(), []

    def fail():
        called.append(0)
        raise RuntimeError("wanted by the test")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for call in [fail, *[lambda: called.append(1)] * 20]:
        starts.add(call)
    await eventually(lambda: called.count(1) == 20)


@pytest.mark.parametrize("path", ["/login", "/v1/completions", "/tokenize"])
async def test_bodies_that_do_not_arrive_leave_room_for_others(serving, tmp_path, path):
    """With a key or without one: their connections are the first to be replaced."""
    file, sent = key_file(tmp_path, slow="inference", other="inference")
    key = sent["slow"]["authorization"].encode()
    async with serving(max_connections=8, keys_file=file) as server:
        begun = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nOrigin: %s\r\n" % (
            path.encode(),
            server.port,
            server.url.encode(),
        )
        begun += b"Authorization: %s\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n{" % key
        of_other = begun.replace(key, sent["other"]["authorization"].encode())
        reader, slow = await opened(server, of_other)  # the oldest, but the only one of its client
        held = [await opened(server, begun) for _ in range(7)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, headers=sent["other"]) as client:
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        if path != "/login":  # where nobody has a key yet
            slow.write(b" " * 3998 + b"}")
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 400 ")
        slow.close()
        for _, writer in held:
            writer.close()


async def test_a_form_that_does_not_arrive_is_answered_in_time(serving, monkeypatch):
    monkeypatch.setattr(login, "FORM_TIMEOUT_S", 0.1)
    async with serving(api_key="k") as server:
        begun = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nOrigin: %s\r\n" % (server.port, server.url.encode())
        status, _, error = await refused(server, begun + b"Content-Length: 4000\r\n\r\nkey=")
    assert (status, error["code"]) == (408, "body_timeout")


def test_a_maximum_below_the_hard_limit_is_found(monkeypatch):
    """As on macOS: the hard limit is infinite, and more than 300 are refused."""

    def setrlimit(_, limits):
        if limits[0] > 300:
            raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    connections, lingering = reserve_open_files(900)
    assert 256 <= connections + OTHER_FILES <= 300
    assert lingering == 64


@pytest.mark.parametrize("hard", ["200", "resource.getrlimit(files)[1]"])
def test_importing_the_model_leaves_the_limits_of_open_files(hard):
    """mlx-lm sets them to 2,048 of 4,096."""
    program = (
        f"import resource; files = resource.RLIMIT_NOFILE; hard = {hard}; resource.setrlimit(files, (150, hard)); "
        "import mlx_parallm.model.loading; print(resource.getrlimit(files) == (150, hard))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found == "True\n"


async def test_half_sent_requests_make_room_for_whole_ones(serving):
    """All connections that there may be are taken by requests whose headers never end."""
    async with serving(max_connections=8, header_timeout=60) as server:
        held = [await opened(server, BEGUN) for _ in range(8)]
        await eventually(lambda: len(server.uvicorn.server_state.connections) == 8)
        for _ in range(3):
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
                assert (await client.get("/health")).status_code == 200
        for _, writer in held:
            writer.close()
