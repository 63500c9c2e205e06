"""Streamed chat completions of any OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from mlx_parallm.cli.remote.client import Client
from mlx_parallm.errors import ParaLLMError

STREAM_TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""In seconds. A request may wait long for its turn in a busy server."""


async def stream_chat(client: Client, http: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """The chunks of one answer, as decoded JSON. Closing the iterator ends the request.

    Raises:
        ConfigError, ParaLLMError: see `Client`; or the server ended the stream with an error.
    """
    url, sent = f"{client.base}/v1/chat/completions", {**body, "stream": True}
    with client.asking():
        async with http.stream("POST", url, json=sent, headers=client.headers) as response:
            if not response.is_success:
                await response.aread()
                client.check(response)
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                    yield _chunk(client, data)


def _chunk(client: Client, data: str) -> Any:
    with client.reading():
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise ParaLLMError(f"the answer failed: {error['message']}")
    return chunk
