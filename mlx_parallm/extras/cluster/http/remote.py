"""RemoteEngines: asks the engine of another node, and notices when that node is lost or cannot be reached any more.

It speaks HTTP/1.0 over plain sockets, one connection for each request: the answer then comes without chunks, so each
line costs little of the time that all streams of the head share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import ValidationError

from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.errors import NodeFailedError
from mlx_parallm.extras.cluster.cards import Member
from mlx_parallm.extras.cluster.http.wire import BEAT, BEAT_S, WireClock, WireEvent, WireRequest

GENERATE, SAMPLE = "/v1/cluster/generate", "/v1/cluster/sample"
_CONNECT_S = 2.0
_SILENT_BEATS = 3
"""A node from which so many beats are missing is cut off. Beats are counted, and not seconds, so that a pause of this
process costs no request."""
_LINE_BYTES = 64 << 20
"""Longest line of an answer. The longest one is that with the logprobs of a prompt."""


class NodeUnreachableError(NodeFailedError):
    """Nothing reaches the node, or nothing comes from it, whatever was asked."""


class RemoteEngines:
    """The engines of other nodes.

    Args:
        token: that of the cluster.
        path: GENERATE, or SAMPLE to ask a head for any node's answer.
    """

    def __init__(self, token: str, path: str = GENERATE) -> None:
        self._token = token
        self._path = path

    async def generate(self, member: Member, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request at another node. Closing the generator ends the request there.

        Raises:
            NodeUnreachableError: the node cannot be reached, or nothing comes from it any more.
            NodeFailedError: it refuses the request, is lost, or sends what is no event.
        """
        try:
            async with _connected(member) as connection:
                connection.writer.write(self._post(WireRequest.of(request).model_dump_json().encode()))
                await connection.writer.drain()
                await _check_status(connection.reader, member)
                shift = time.monotonic() - WireClock.model_validate_json(await connection.line()).clock
                while line := await connection.line():
                    yield WireEvent.model_validate_json(line).event(shift)
        except OSError as error:  # a timeout is one too
            raise NodeUnreachableError(f"node {member.info.id} has failed: {_reason(error)}") from error
        except ValueError as error:  # a ValidationError is one too
            raise NodeFailedError(f"node {member.info.id} has failed: {_reason(error)}") from error

    def _post(self, body: bytes) -> bytes:
        lines = (
            f"POST {self._path} HTTP/1.0",
            "Host: localhost",
            "Content-Type: application/json",
            f"Authorization: Bearer {self._token}",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection to a node. When the node is lost or silent, reading and writing raise: a node that stands still, or
    whose packets do not arrive, closes nothing."""

    member: Member
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: bool = False

    async def line(self) -> bytes:
        """The next line that is no beat; empty at the end."""
        while line := await self.reader.readline():
            self.heard = True
            if line != BEAT:
                break
        return line

    async def cut_when_gone(self) -> None:
        """Returns when the node is lost or silent and the connection is cut."""
        node, silent = self.member.info.id, 0
        error = NodeFailedError(f"node {node} is lost")
        while not self.member.lost.is_set():
            self.heard = False
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self.member.lost.wait()
            silent = 0 if self.heard else silent + 1
            if silent == _SILENT_BEATS and not self.member.lost.is_set():
                error = NodeUnreachableError(f"nothing has come from node {node} for {silent * BEAT_S:g} s")
                break
        self.reader.set_exception(error)
        self.writer.transport.abort()


@asynccontextmanager
async def _connected(member: Member) -> AsyncIterator[_Connection]:
    address = urlsplit(member.info.url)
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_LINE_BYTES)
    connection = _Connection(member, reader, writer)
    watching = asyncio.create_task(connection.cut_when_gone())
    try:
        yield connection
    finally:
        watching.cancel()
        writer.close()


async def _check_status(reader: asyncio.StreamReader, member: Member) -> None:
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass  # headers
    if status.split()[1:2] != [b"200"]:
        raise NodeFailedError(f"node {member.info.id} refuses the request: {_message(status, await reader.read())}")


def _message(status: bytes, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return status.decode("latin-1").strip() or "it ends the connection"


def _reason(error: Exception) -> str:
    return "it sends what is no event" if isinstance(error, ValidationError) else str(error) or type(error).__name__
