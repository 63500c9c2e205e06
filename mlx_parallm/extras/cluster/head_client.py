"""HeadClient: the routes of the head, as the other nodes use them."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import TypeAdapter, ValidationError

from mlx_parallm import atomic
from mlx_parallm.adapters.checkpoints import file_sum
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError, ConflictError, EngineError
from mlx_parallm.extras.cluster.archive import digest
from mlx_parallm.extras.cluster.cards import BaseFile, Joined, Joining, SharedVersion

_CONNECT_S, _ANSWER_S = 2.0, 60.0
_SILENT_S = 10.0
"""How long the head may send nothing while an archive is fetched, or while a node joins that has the base model."""
_CHECKSUMS_S = 1800.0
"""How long the head may take to read a large base model for its checksums."""
_JOINED, _VERSION = TypeAdapter(Joined), TypeAdapter(SharedVersion)


class HeadUnreachableError(EngineError):
    """The head does not answer now. It may be starting again."""


class HeadRefusesError(ConfigError):
    """The head does not do what is asked of it."""


class HeadClient:
    """The head at `address`, which is HOST:PORT. The token is that of the cluster.

    Every method raises HeadUnreachableError if the head does not answer, and HeadRefusesError if it refuses what is
    asked.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._headers = {"authorization": f"Bearer {token}", "host": "localhost"}
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}",
            headers=self._headers,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def join(self, joining: Joining) -> Joined:
        """Joins, or joins again."""
        body = asdict(joining)
        answer_s = _CHECKSUMS_S if joining.fingerprint is None else _SILENT_S
        timeout = httpx.Timeout(answer_s, connect=_CONNECT_S)
        response = await self._send("POST", "/v1/cluster/join", json=body, timeout=timeout)
        joined: Joined = self._read(_JOINED, response)
        return joined

    async def put_adapter(self, ref: AdapterRef, archive: bytes, fence: int = 0) -> SharedVersion:
        """Uploads an adapter version. When this returns, it is staged, and nodes fetch it.

        Raises:
            ConflictError: there is a version of this name and number with another content, or another trainer has the
                lease of the name.
        """
        headers = {"x-sha256": digest(archive), "x-fence": str(fence), "content-type": "application/x-tar"}
        try:
            response = await self._send("PUT", _adapter(ref), content=archive, headers=headers)
        except HeadRefusesError as error:
            raise ConflictError(str(error)) from error
        version: SharedVersion = self._read(_VERSION, response)
        return version

    async def adapter(self, version: SharedVersion) -> bytes:
        """The archive of a version.

        Raises:
            EngineError: it does not have the checksum of the registry.
        """
        data = await asyncio.to_thread(self._download, _adapter(version.ref))
        if await asyncio.to_thread(digest, data) != version.sha256:
            raise EngineError(f"the archive of {version.ref} has another checksum than the registry")
        return data

    async def fetch_base(self, files: tuple[BaseFile, ...], folder: Path) -> None:
        """Fetches the files of the base model that are not in `folder` yet, or not complete.

        Raises:
            EngineError: a file does not have the checksum that the head gave.
        """
        await asyncio.to_thread(atomic.make_folder, folder)
        for file in files:
            if Path(file.path).name != file.path:
                raise ConfigError(f"the head at {self.address} names a file outside the model's folder: {file.path!a}")
            await self._fetch(file, folder / file.path)

    async def _fetch(self, file: BaseFile, path: Path) -> None:
        if path.exists():
            return
        part = path.with_name(f".{path.name}.part")
        begun = part.stat().st_size if part.exists() else 0
        if begun < file.bytes or not part.exists():
            headers = {"range": f"bytes={begun}-"} if begun else {}
            async with self._stream(f"/v1/cluster/base/{file.path}", headers) as response:
                with part.open("ab" if response.status_code == 206 else "wb") as opened:
                    async for chunk in response.aiter_raw():
                        await asyncio.to_thread(opened.write, chunk)
        if (await asyncio.to_thread(file_sum, part)).sha256 != file.sha256:
            part.unlink()
            raise EngineError(f"{file.path} has another checksum than the head's; it was removed, try again")
        part.rename(path)

    def _download(self, path: str) -> bytes:
        """The body at a path. It blocks. `http.client` reads 20 MB in a third of the time that httpx takes."""
        try:
            with closing(http.client.HTTPConnection(self.address, timeout=_SILENT_S)) as connection:
                connection.request("GET", path, headers=self._headers)
                answer = connection.getresponse()
                response = httpx.Response(answer.status, content=answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        self._check(response)
        return response.content

    @asynccontextmanager
    async def _stream(self, path: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        try:
            async with self._client.stream("GET", path, headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                self._check(response)
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._client.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._check(response)
        return response

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = f"status {response.status_code}"
        if response.status_code == 401:
            reason = "the token is not the cluster's; set MLX_PARALLM_CLUSTER_TOKEN to that of the head"
        if response.status_code >= 500:
            raise HeadUnreachableError(f"the head at {self.address} cannot answer: {reason}")
        raise HeadRefusesError(f"the head at {self.address} refuses this node: {reason}")

    def _unreachable(self, error: Exception) -> HeadUnreachableError:
        reason = str(error) or type(error).__name__
        return HeadUnreachableError(
            f"no head answers at {self.address} ({reason}); start it there with --share-model, or correct --connect-to"
        )

    def _read(self, kind: TypeAdapter[Any], response: httpx.Response) -> Any:
        try:
            return kind.validate_json(response.content)
        except ValidationError as error:
            raise ConfigError(f"{self.address} answers, but not as a head of this version does") from error


def _adapter(ref: AdapterRef) -> str:
    return f"/v1/cluster/adapters/{ref.name}/{ref.version}"
