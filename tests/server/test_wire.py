"""HTTP as bytes on real sockets: what is malformed, or could be read in two ways, reaches no route."""

import asyncio
import contextlib
import re

import pytest

PATIENCE_S = 30
KEY = b"Authorization: Bearer secret\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + KEY + b"Content-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b'{"prompt":"x"}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


async def answers_to(server, raw):
    """The statuses of all answers to these bytes, after which the client sends no more. The server closes the
    connection, at the latest when it has been idle."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    received = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


MALFORMED = {
    "two lengths": POST + b"Content-Length: 14\r\nContent-Length: 15\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 14, 15\r\n\r\n" + BODY,
    "a negative length": POST + b"Content-Length: -14\r\n\r\n" + BODY,
    "a length with a sign": POST + b"Content-Length: +14\r\n\r\n" + BODY,
    "a hexadecimal length": POST + b"Content-Length: 0xe\r\n\r\n" + BODY,
    "another transfer encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "two transfer encodings": POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + CHUNKED,
    "a transfer encoding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n" + CHUNKED,
    "a length and chunks": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED,
    "two hosts": GET + b"Host: evil.example\r\n" + KEY + b"\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n" + KEY + b"\r\n",
    "NUL in a header": GET + KEY + b"X: a\x00b\r\n\r\n",
    "a line without a colon": GET + KEY + b"X\r\n\r\n",
    "a space in the path": b"GET /v1 /models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + KEY + b"\r\n",
    "no HTTP": b"\x00\xff\xfe\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


async def test_what_is_malformed_is_answered_once_and_reaches_no_route(serving, engine):
    """However it ends, nothing behind it is read as a second request."""
    hidden = POST + b"Content-Length: 14\r\n\r\n" + BODY
    async with serving(api_key="secret", header_timeout=2) as server:
        sent = [answers_to(server, raw + hidden) for raw in MALFORMED.values()]
        answers = dict(zip(MALFORMED, await asyncio.gather(*sent), strict=True))
    assert answers.pop("HTTP/2") == [403, 400], "its first line has the form of a request, without a Host header"
    assert {name: statuses for name, statuses in answers.items() if statuses != [400]} == {}
    assert not engine.requests


@pytest.mark.parametrize("header", [b"X: " + b"a" * 100_000, b"X: a\r\n" * 20_000], ids=["long", "many"])
async def test_headers_have_a_largest_size(serving, engine, header):
    async with serving(api_key="secret") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET + b"Connection: close\r\n" + KEY + header + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # it may close with the rest of them unread
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        writer.close()
        assert await answers_to(server, GET + KEY + b"Connection: close\r\n\r\n") == [200]
    assert not engine.requests


async def test_a_malformed_chunk_ends_its_request(serving, engine):
    async with serving(api_key="secret") as server:
        for length in (b"zz", b"-1", b"+e", b"0x0e"):
            raw = POST + b"Transfer-Encoding: chunked\r\n\r\n" + length + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
            assert await answers_to(server, raw) == [400]
    assert not engine.requests


@pytest.mark.parametrize("answered_first", [False, True])
async def test_a_malformed_chunk_of_a_request_that_is_answered_anyway_leaves_no_trace(serving, caplog, answered_first):
    """No route waits for a body without a key, so its answer comes before or after the chunk."""
    raw = POST.replace(KEY, b"") + b"Transfer-Encoding: chunked\r\n\r\n"
    async with serving(api_key="secret") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw if answered_first else raw + b"zz\r\n")
        if answered_first:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
            writer.write(b"zz\r\n")
        await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_each_of_several_requests_in_one_packet_needs_its_own_key(serving):
    last = b"Connection: close\r\n\r\n"
    async with serving(api_key="secret") as server:
        assert await answers_to(server, (GET + KEY + b"\r\n") * 4 + GET + KEY + last) == [200] * 5
        wrong = GET + b"Authorization: Bearer wrong\r\n\r\n"
        assert await answers_to(server, GET + KEY + b"\r\n" + wrong + GET + b"\r\n" + GET + KEY + last) == [
            *(200, 401, 401, 200)
        ]


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.2"])
async def test_no_other_protocol_is_switched_to(serving, upgrade):
    headers = f"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    async with serving(api_key="secret") as server:
        assert await answers_to(server, GET + headers.encode()) == [401]
        assert await answers_to(server, GET + KEY + headers.encode()) == [200]


@pytest.mark.parametrize("target", ["127.0.0.1:22", "/pause", "http://127.0.0.1/pause"])
async def test_the_server_is_no_proxy(serving, engine, target):
    for method in ("CONNECT", "GET", "POST"):
        line = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        async with serving(api_key="secret") as server:
            assert await answers_to(server, line.encode()) == [401]
    assert not engine.pauses


async def test_without_a_key_no_body_is_asked_for_or_read(serving):
    raw = POST.replace(KEY, b"") + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 10000000\r\n\r\n"
    async with serving(api_key="secret") as server:
        assert await answers_to(server, raw) == [401]


async def test_a_client_may_wait_until_its_body_is_asked_for(serving):
    async with serving(api_key="secret") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(BODY)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
