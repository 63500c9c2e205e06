"""The client of a running server that the commands use."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_parallm import __version__
from mlx_parallm.cli.parser import argument
from mlx_parallm.cli.show import show
from mlx_parallm.config import API_KEY_VARIABLE
from mlx_parallm.errors import ConfigError, ParaLLMError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 5.0

_SPOKEN = {
    "POST /v1/training/start": "`mlx_parallm training start --adapter NAME`",
    "POST /v1/training/stop": "`mlx_parallm training stop --adapter NAME`",
    "POST /v1/training/pause": "`mlx_parallm training pause`",
    "POST /v1/training/rollback": "`mlx_parallm training rollback --adapter NAME`",
    "POST /v1/adapters/route": "`mlx_parallm adapters route`",
    "GET /v1/adapters": "`mlx_parallm adapters list`",
    "load_inplace true": "--replace",
    "send stop_training true": "add --stop-training",
    "base_model_name": "--base",
    "lora_adapter: ": "",
    "lora_name: ": "",
    "lora_path: ": "",
}
"""What the errors of a server name as routes and fields of JSON, as the command line has it."""


SERVER = (
    argument("--url", default="http://127.0.0.1:8000", help="The server's address. Default: %(default)s."),
    argument("--api-key", metavar="KEY", help=f"The server's key. Default: ${API_KEY_VARIABLE}."),
)
"""The arguments of a command that asks a server."""


class Client:
    """A running server, at `args.url` with or without /v1.

    Raises:
        ConfigError: the URL is not an http address, or the server refuses the API key or the Host header.
        ParaLLMError: nothing answers there, another kind of server answers, or the server refuses the request; in the
            last case the message is the server's own.
    """

    def __init__(self, args: Namespace) -> None:
        self.base = args.url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise ConfigError(f"--url: must start with http:// or https://, got {args.url!r}")
        api_key = args.api_key or os.environ.get(API_KEY_VARIABLE)
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """The decoded JSON answer to a GET without a body, or to a POST with one."""
        import httpx

        method = "GET" if body is None else "POST"
        with self.asking(timeout_s):
            response = httpx.request(method, self.base + path, json=body, headers=self.headers, timeout=timeout_s)
        self.check(response)
        with self.reading():
            return response.json()

    def show(
        self,
        args: Namespace,
        text: Callable[[Any], str],
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        """Asks as `ask` does, and prints the answer: as JSON with --json, or else its `text`."""
        answer = self.ask(path, body, timeout_s)
        with self.reading():
            shown = text(answer)
        return show(args, answer, shown)

    def streaming(self, connections: int) -> httpx.AsyncClient:
        """What `stream_chat` sends its requests by, so many of them at a time. One may wait long in a busy server."""
        import httpx

        limits, timeout = httpx.Limits(max_connections=connections), httpx.Timeout(10.0, read=600.0)
        return httpx.AsyncClient(timeout=timeout, limits=limits)

    async def stream_chat(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The chunks of one answer of any OpenAI-compatible server, as decoded JSON. Closing the iterator ends the
        request.

        Raises:
            ConfigError, ParaLLMError: see the class; or the server ended the stream with an error.
        """
        url, sent = f"{self.base}/v1/chat/completions", {**body, "stream": True}
        with self.asking():
            async with http.stream("POST", url, json=sent, headers=self.headers) as response:
                if not response.is_success:
                    await response.aread()
                    self.check(response)
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                        yield self._chunk(data)

    def _chunk(self, data: str) -> Any:
        with self.reading():
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise ParaLLMError(f"the answer failed: {error['message']}")
        return chunk

    @contextmanager
    def asking(self, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
        """Wraps requests: errors of the connection become those of this class."""
        import httpx

        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, UnicodeError) as error:
            # the error's text may contain the key
            raise ConfigError("--url or --api-key: it cannot be part of an HTTP request") from error
        except httpx.TimeoutException as error:
            raise ParaLLMError(f"{self.base} did not answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            start = "start one with `mlx_parallm serve`, or pass --url"
            raise ParaLLMError(f"no server answers at {self.base}: {start}") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps code that reads an answer: a missing field, or one of another type, means that it is another server."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ParaLLMError(f"{self.base} answers, but not as MLX ParaLLM {__version__} does") from error

    def check(self, response: httpx.Response) -> None:
        """Raises what the server's error says, if the answer, which has been read, is one."""
        if response.is_success:
            return
        if response.status_code == 401:
            raise ConfigError(f"{self.base} requires its API key: pass --api-key or set {API_KEY_VARIABLE}")
        message = _message(response.content) or f"{response.url} answered with status {response.status_code}"
        for said, here in _SPOKEN.items():
            message = message.replace(said, here)
        raise ConfigError(message) if response.status_code == 403 else ParaLLMError(message)


def _message(body: bytes) -> str | None:
    """The message in an error body of OpenAI's form; None if the body has another form."""
    try:
        message = json.loads(body)["error"]["message"]
    except (LookupError, TypeError, ValueError):
        return None
    return message if isinstance(message, str) and message.strip() else None
