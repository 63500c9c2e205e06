"""A small HTTP client, for the commands that talk to a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mlx_parallm import __version__
from mlx_parallm.config import API_KEY_VARIABLE
from mlx_parallm.errors import ConfigError, ParaLLMError

TIMEOUT_S = 5.0
_MOST_ERROR_BYTES = 65536


class Client:
    """A running server. `get` and `post` return the decoded JSON body of the answer.

    Args:
        url: its address, with or without /v1.
        api_key: None if the server requires none.

    Raises:
        ConfigError: `url` is not an http address, or the server refuses the API key or the Host header.
        ParaLLMError: nothing answers there, another kind of server answers, or the server refuses the request; in the
            last case the message is the server's own.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise ConfigError(f"--url: must start with http:// or https://, got {url!r}")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        return self._ask(path, None, TIMEOUT_S)

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = TIMEOUT_S) -> Any:
        return self._ask(path, json.dumps(body).encode(), timeout_s)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps code that reads an answer: a missing field, or one of another type, means that it is another server."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ParaLLMError(f"{self.base} answers, but not as MLX ParaLLM {__version__} does") from error

    def _ask(self, path: str, body: bytes | None, timeout_s: float) -> Any:
        try:
            with urlopen(Request(self.base + path, body, self._headers), timeout=timeout_s) as response, self.reading():
                return json.load(response)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except TimeoutError as error:
            raise ParaLLMError(f"{self.base} did not answer within {timeout_s:g} s") from error
        except (OSError, HTTPException) as error:
            start = "start one with `mlx_parallm serve`, or pass --url"
            raise ParaLLMError(f"no server answers at {self.base}: {start}") from error
        except ValueError as error:  # the error's text may contain the key
            raise ConfigError("--url or --api-key: it cannot be part of an HTTP request") from error

    def _refusal(self, error: HTTPError) -> ParaLLMError:
        if error.code == 401:
            return ConfigError(f"{self.base} requires its API key: pass --api-key or set {API_KEY_VARIABLE}")
        message = _message(error) or f"{error.url} answered with status {error.code}"
        return ConfigError(message) if error.code == 403 else ParaLLMError(message)


def _message(error: HTTPError) -> str | None:
    """The message in an error body of OpenAI's form; None if the body has another form."""
    try:
        message = json.loads(error.read(_MOST_ERROR_BYTES))["error"]["message"]
    except (OSError, HTTPException, LookupError, TypeError, ValueError):
        return None
    return message if isinstance(message, str) and message.strip() else None
