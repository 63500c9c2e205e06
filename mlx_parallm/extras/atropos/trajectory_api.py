"""TrajectoryApi: the routes that a trainer calls on Atropos' trajectory API, which `run-api` serves."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 20.0
_MAX_BODY = 1 << 28
"""Largest answer, in bytes. A batch of 256 sequences of 8,000 tokens has about 60 MB."""

_SHOWN = 200
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ApiUnreachableError(Exception):
    """The API does not answer, or answers with an error. The message is for people."""


class NotRegisteredError(Exception):
    """The API knows no trainer: nobody has registered since it started, or its data was reset."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a trainer tells the API and, through it, the environments.

    Attributes:
        batch_size: sequences in a batch.
        max_token_len: environments drop groups with a sequence that is not shorter.
        checkpoint_dir, save_checkpoint_interval: where and how often environments keep their own state.
        num_steps: batches that will be asked for in all.
    """

    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    wandb_group: str
    wandb_project: str


class TrajectoryApi:
    """Asks one API, one request at a time, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        direct = urlsplit(self.url).hostname in _LOOPBACK  # a proxy does not know this machine's addresses
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="atropos")

    async def register(self, registration: Registration) -> Mapping[str, Any]:
        """Registers a trainer, and returns the batch size and the longest sequence that the API works with, which are
        those of the first trainer that registered.

        Raises:
            ApiUnreachableError: it did not answer.
        """
        await self._ask("/register", asdict(registration))
        info = await self._ask("/info")
        if not isinstance(info, dict):
            raise ApiUnreachableError(f"{self.url}/info answered {str(info)[:_SHOWN]}, which is not Atropos' API")
        return info

    async def batch(self) -> list[Any] | None:
        """Takes the next batch out of the API's queue; None: there are too few groups for one.

        Raises:
            NotRegisteredError: register first.
            ApiUnreachableError: it did not answer.
        """
        answer = await self._ask("/batch")
        if not isinstance(answer, dict) or "batch" not in answer:
            raise ApiUnreachableError(f"{self.url}/batch answered {str(answer)[:_SHOWN]}, which is not Atropos' API")
        if answer.get("status") == "error":
            raise NotRegisteredError(str(answer.get("message")))
        batch = answer["batch"]
        if batch is None or isinstance(batch, list):
            return batch
        raise ApiUnreachableError(f"{self.url}/batch answered with a batch that is no list")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, partial(self._asked, path, body))

    def _asked(self, path: str, body: Mapping[str, object] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                raw = response.read(_MAX_BODY + 1)
        except urllib.error.HTTPError as error:
            shown = error.read(_SHOWN).decode("utf-8", "replace")
            raise ApiUnreachableError(f"{self.url}{path} answered {error.code}: {shown}") from error
        except (OSError, HTTPException) as error:
            raise ApiUnreachableError(f"{self.url} cannot be reached: {getattr(error, 'reason', error)}") from error
        if len(raw) > _MAX_BODY:
            raise ApiUnreachableError(f"{self.url}{path} answered with more than {_MAX_BODY >> 20} MiB")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ApiUnreachableError(f"{self.url}{path} did not answer with JSON") from error
