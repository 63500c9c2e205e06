"""Connections between two processes of one machine, which can be cut as a network between two machines can.

No root is needed, and it works on every system: each process gets the address of a relay instead of that of the other.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from benchmarks.lib.load import HOST

_CHUNK_BYTES = 1 << 16


class Cut(StrEnum):
    """How a link is cut."""

    REFUSED = "refused"
    """Open connections are reset, and new ones refused."""
    VANISH = "vanish"
    """Nothing arrives any more, in either direction, and no connection ends. What was sent arrives when the link is
    mended, if its connection is still open."""


class Link:
    """A relay to `target`, a port of this machine.

    Attributes:
        port: where it listens.
        renamed: bytes of what comes back, and what is sent on in their place. Both are equally long.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.renamed: tuple[bytes, bytes] | None = None
        self._passing = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        """Lets everything pass."""
        self._passing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, how: Cut) -> None:
        """Cuts the link until it is mended."""
        if how is Cut.VANISH:
            self._passing.clear()
            return
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        """Ends all connections, and waits for that."""
        self.cut(Cut.REFUSED)
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        try:
            there, back = self._pump(reader, far_writer, _same), self._pump(far_reader, writer, self._rename)
            await asyncio.gather(there, back)
        finally:
            for end in (writer, far_writer):
                self._open.discard(end)
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._passing.wait()
                writer.write(change(data))
                await writer.drain()
        await self._passing.wait()
        with suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()

    def _rename(self, data: bytes) -> bytes:
        return data.replace(*self.renamed) if self.renamed else data


def _same(data: bytes) -> bytes:
    return data
