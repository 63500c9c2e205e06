"""RemoteEngines: asks the engine of another node, and notices when that node is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import httpx
from pydantic import ValidationError

from mlx_parallm.core import Event, GenerationRequest, Member
from mlx_parallm.errors import NodeFailedError
from mlx_parallm.server.cluster.wire import WireClock, WireEvent, WireRequest

_CONNECT_S, _WRITE_S = 2.0, 10.0


class RemoteEngines:
    """The engines of other nodes. `token`: that of the cluster."""

    def __init__(self, token: str) -> None:
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}", "host": "localhost", "content-type": "application/json"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S, write=_WRITE_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def generate(self, member: Member, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request at another node. Closing the generator ends the request there.

        Raises:
            NodeFailedError: the node refuses the request, is lost, or ends the events too soon.
        """
        url, body = f"{member.info.url}/v1/cluster/generate", WireRequest.of(request).model_dump_json()
        try:
            async with self._client.stream("POST", url, content=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise NodeFailedError(f"node {member.info.id} refuses the request: {await _reason(response)}")
                async with aclosing(_until_lost(response, member)) as chunks:
                    async for event in _events(chunks):
                        yield event
        except (httpx.HTTPError, ValidationError) as error:
            raise NodeFailedError(f"node {member.info.id} has failed: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    rest, shift = b"", None
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if shift is None:
                shift = time.monotonic() - WireClock.model_validate_json(line).clock
            else:
                yield WireEvent.model_validate_json(line).event(shift)


async def _until_lost(response: httpx.Response, member: Member) -> AsyncGenerator[bytes, None]:
    """The chunks of an answer. Raises NodeFailedError when its node is lost: a stopped process closes no connection."""
    lost = asyncio.ensure_future(member.lost.wait())
    chunks = response.aiter_raw()
    try:
        while True:
            reading = asyncio.ensure_future(anext(chunks, None))
            try:
                await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise NodeFailedError(f"node {member.info.id} is lost")
            finally:
                reading.cancel()
            if (chunk := await reading) is None:
                return
            yield chunk
    finally:
        lost.cancel()


async def _reason(response: httpx.Response) -> str:
    await response.aread()
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
