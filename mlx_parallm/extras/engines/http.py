"""The connection to the server of an outside inference engine: JSON over HTTP, with limits on time and size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from mlx_parallm.config import is_loopback
from mlx_parallm.errors import EngineError, shown

MAX_ANSWER_BYTES = 256 << 20
_CONNECTIONS = 64
_CONNECT_S = 10.0
_PAUSES_S = (0.5, 2.0)
"""Before a server that does not accept connections is tried again."""


class EngineServerError(EngineError):
    """The server of an outside inference engine failed a request, or its answer cannot be used.

    `status`: the HTTP status, None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineServer:
    """One server. Event loop's thread only.

    Args:
        name: what errors call it, such as `vllm`.
        url: its address. A final `/v1` is left out, because some routes are not below it.
        api_key: sent as a bearer token; empty for none.
        timeout_s: the longest that one request may take, in seconds.
    """

    def __init__(self, name: str, url: str, api_key: str, timeout_s: float) -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            trust_env=not is_loopback(urlsplit(url).hostname or ""),  # a proxy does not know this machine's addresses
        )

    async def get(self, path: str) -> Any:
        """The answer to GET as JSON. Raises EngineServerError."""
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The answer to POST: as JSON, or as text if it is no JSON. Raises EngineServerError."""
        return await self._send("POST", path, body)

    async def close(self) -> None:
        await self._client.aclose()

    def unusable(self, reason: str) -> EngineServerError:
        """The error for an answer that lacks what training needs."""
        return EngineServerError(f"the {self.name} engine at {self._url} {reason}")

    async def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        for pause_s in (*_PAUSES_S, None):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._answer(method, path, body)
            except TimeoutError as error:
                raise self.unusable(f"did not answer {path} within {self._timeout_s:g} s") from error
            except httpx.ConnectError as error:
                if pause_s is None:
                    raise self.unusable(f"cannot be reached: {error}") from error
                await asyncio.sleep(pause_s)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise self.unusable(f"failed {path}: {str(error) or type(error).__name__}") from error
        raise AssertionError("the last attempt returns or raises")

    async def _answer(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        content = bytearray()
        async with self._client.stream(method, path, json=body) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise self.unusable(f"answered {path} with more than {MAX_ANSWER_BYTES >> 20} MiB")
        text = content.decode("utf-8", "replace")
        if response.status_code >= 400:
            message = f"the {self.name} engine at {self._url} answered {path} with {response.status_code}"
            raise EngineServerError(f"{message}: {shown(text)}", response.status_code)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
