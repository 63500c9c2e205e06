"""RemoteEngines: asks the engine of another node, and notices when that node is lost.

It speaks HTTP/1.0 over plain sockets, one connection for each request: the answer then comes without chunks, so each
line costs little of the time that all streams of the head share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from pydantic import ValidationError

from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.errors import NodeFailedError
from mlx_parallm.extras.cluster.cards import Member
from mlx_parallm.extras.cluster.http.wire import WireClock, WireEvent, WireRequest

GENERATE, SAMPLE = "/v1/cluster/generate", "/v1/cluster/sample"
_CONNECT_S = 2.0
_LINE_BYTES = 64 << 20
"""Longest line of an answer. The longest one is that with the logprobs of a prompt."""


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
            NodeFailedError: the node refuses the request, is lost, or ends the events too soon.
        """
        try:
            async with _connected(member) as (reader, writer):
                writer.write(self._post(WireRequest.of(request).model_dump_json().encode()))
                await writer.drain()
                await _check_status(reader, member)
                shift = time.monotonic() - WireClock.model_validate_json(await reader.readline()).clock
                async for line in reader:
                    yield WireEvent.model_validate_json(line).event(shift)
        except (OSError, ValueError) as error:  # a timeout is an OSError, and a ValidationError a ValueError
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


@asynccontextmanager
async def _connected(member: Member) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a node. When the node is lost, reading and writing raise: a stopped process closes nothing."""
    address = urlsplit(member.info.url)
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_LINE_BYTES)

    async def cut_when_lost() -> None:
        await member.lost.wait()
        reader.set_exception(NodeFailedError(f"node {member.info.id} is lost"))
        writer.transport.abort()

    watching = asyncio.create_task(cut_when_lost())
    try:
        yield reader, writer
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
