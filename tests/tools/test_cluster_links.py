"""The relays by which a benchmark cuts the network between two processes."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from benchmarks.lib.cluster.links import Cut, Link


async def _echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)
    writer.close()


@asynccontextmanager
async def linked():
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server, asyncio.timeout(20):
        link = Link(server.sockets[0].getsockname()[1])
        await link.mend()
        try:
            yield link
        finally:
            await link.close()


async def said(reader, writer, text):
    writer.write(text + b"\n")
    return (await reader.readline()).strip()


async def test_a_refusing_link_resets_what_is_open_and_takes_nothing_new():
    async with linked() as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        assert await said(reader, writer, b"one") == b"one"
        link.cut(Cut.REFUSED)
        with suppress(ConnectionError):
            assert await said(reader, writer, b"two") == b"", "it has ended"
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", link.port)
        await link.mend()
        assert await said(*await asyncio.open_connection("127.0.0.1", link.port), b"three") == b"three"


async def test_packets_that_vanish_arrive_when_the_link_is_mended_and_nothing_ends_before():
    async with linked() as link:
        old = await asyncio.open_connection("127.0.0.1", link.port)
        link.cut(Cut.VANISH)
        new = await asyncio.open_connection("127.0.0.1", link.port)
        asking = [asyncio.create_task(said(*ends, b"hello")) for ends in (old, new)]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in asking)
        await link.mend()
        assert await asyncio.gather(*asking) == [b"hello"] * 2
