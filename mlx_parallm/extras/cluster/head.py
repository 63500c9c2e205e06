"""Head: the first node of a cluster. It lets nodes join, and keeps the base model and the shared versions for them.
Their archives are in its folder, each one file that is there whole or not at all.

    adapters/NAME/VERSION.tar
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm import __version__, atomic
from mlx_parallm.adapters.checkpoints import file_sum
from mlx_parallm.core.adapters import AdapterRef, check_name
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError, UnknownModelError
from mlx_parallm.extras.cluster.addresses import in_url
from mlx_parallm.extras.cluster.archive import check, digest
from mlx_parallm.extras.cluster.cards import BaseFile, Joined, Joining, NodeRole, SharedBase, SharedVersion
from mlx_parallm.extras.cluster.connection import Connection, NatsAddress, connect
from mlx_parallm.extras.cluster.follower import NodeAdapters
from mlx_parallm.extras.cluster.nats_server import NatsServer, nats_server
from mlx_parallm.extras.cluster.nats_watch import keep_storing
from mlx_parallm.extras.cluster.node import Node, id_of, running
from mlx_parallm.extras.cluster.state import locked_folder, own_token
from mlx_parallm.extras.cluster.versions import Versions

_FOLLOWS_S = 10.0
"""How long a head that starts may take to load the versions that it has, before it serves without the rest."""


class AdapterArchives:
    """Blocks on the disk, so call it in a worker thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        atomic.make_folder(folder)

    def put(self, ref: AdapterRef, archive: bytes, sha256: str, fence: int) -> SharedVersion:
        """Keeps an archive, in place of one that was there. Doing so again changes nothing.

        Raises:
            InvalidRequestError: it has another checksum, or is not an adapter's.
        """
        found = digest(archive)
        if found != sha256.lower():
            raise InvalidRequestError(f"X-Sha256: the body has the SHA-256 {found}; send it again.", param="X-Sha256")
        check(archive)
        file = self._file(ref)
        atomic.make_folder(file.parent)
        atomic.replace_file(file, archive)
        return SharedVersion(ref.name, ref.version, found, len(archive), fence)

    def path(self, ref: AdapterRef) -> Path:
        """The file of a version. Raises UnknownModelError: there is none."""
        file = self._file(ref)
        if not file.exists():
            raise UnknownModelError(f"The head has no adapter version {ref}.")
        return file

    def remove(self, ref: AdapterRef) -> None:
        """Removes the file of a version that nobody needs any more."""
        self._file(ref).unlink(missing_ok=True)

    def _file(self, ref: AdapterRef) -> Path:
        return self._folder / ref.name / f"{ref.version}.tar"


class BaseFiles:
    """The files in the folder of a base model. Their checksums are computed once, when somebody first wants them.

    Args:
        folder: None for the bundled model, which every node has.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._listing: asyncio.Task[tuple[BaseFile, ...]] | None = None

    async def listed(self) -> tuple[BaseFile, ...]:
        """All files, with their checksums."""
        if self._listing is None or (self._listing.done() and self._listing.exception()):
            self._listing = asyncio.create_task(asyncio.to_thread(self._list))
        return await asyncio.shield(self._listing)

    def path(self, name: str) -> Path:
        """The path of a file. Raises InvalidRequestError: the base model has no such file."""
        for file in self._files():
            if file.name == name:
                return file
        raise InvalidRequestError("The base model has no file of that name; see POST /v1/cluster/join.", param="file")

    def _files(self) -> list[Path]:
        entries = self._folder.iterdir() if self._folder is not None else ()
        return sorted(entry for entry in entries if entry.is_file() and not entry.name.startswith("."))

    def _list(self) -> tuple[BaseFile, ...]:
        sums = ((file.name, file_sum(file)) for file in self._files())
        return tuple(BaseFile(name, found.bytes, found.sha256) for name, found in sums)


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How a head is started.

    Attributes:
        base, base_folder: the base model, and the folder of its files; None if every node has them.
        nats_url: an outside NATS server; None: one of its own, which listens on `host`.
        token: None: one of its own, which is kept in the folder.
        advertised: the host at which others reach this one; None: the one at which they have reached it.
    """

    folder: Path
    base: SharedBase
    base_folder: Path | None
    host: str
    nats_url: str | None = None
    token: str | None = None
    advertised: str | None = None


class Head(Node):
    """The node that the others join."""

    def __init__(
        self, settings: HeadSettings, token: str, adapters: NodeAdapters, connection: Connection, nats: NatsAddress
    ) -> None:
        super().__init__(NodeRole.HEAD, settings.base.fingerprint, token, adapters, settings.folder / "unpacked")
        self._settings = settings
        self._nats = nats
        self._versions = Versions(connection)
        self._archives = AdapterArchives(settings.folder / "adapters")
        self._base_files = BaseFiles(settings.base_folder)
        self._uploading = asyncio.Lock()

    async def fetch(self, version: SharedVersion) -> bytes:
        """See `Node.fetch`."""
        archive = await asyncio.to_thread(self._archives.path(version.ref).read_bytes)
        if await asyncio.to_thread(digest, archive) != version.sha256:
            raise AdapterFileError(f"the archive of {version.ref} is damaged; publish a new version")
        return archive

    async def _changed(self) -> None:
        """Also removes versions that are older than any node needs."""
        await super()._changed()
        for name in self.follower.state.live:
            for version in await self._versions.remove_old(self.follower.state, name):
                await asyncio.to_thread(self._archives.remove, version.ref)

    # -- what the HTTP server uses -----------------------------------------------------------------

    async def join(self, joining: Joining, reached_at: str) -> Joined:
        """See `Node.join`."""
        base = self._settings.base
        if joining.version != __version__:
            raise ConflictError(
                f"version: the head runs MLX ParaLLM {__version__}, and this node {joining.version}; install the same.",
                param="version",
            )
        if joining.fingerprint not in (None, base.fingerprint):
            raise ConflictError(
                f"fingerprint: this cluster serves {base.name} ({base.fingerprint}), and the node has another base "
                f"model ({joining.fingerprint}); start it without --model-path, and it fetches the right one.",
                param="fingerprint",
            )
        files = await self._base_files.listed() if joining.fingerprint is None else ()
        shared = SharedBase(base.name, base.fingerprint, files)
        return Joined(id_of(joining.role, joining.url), self._nats_url(reached_at), self._nats.token, shared)

    def _nats_url(self, reached_at: str) -> str:
        if self._settings.nats_url is not None:
            return self._settings.nats_url
        host = self._settings.advertised or reached_at
        return f"nats://{in_url(host)}:{self._nats.url.rpartition(':')[2]}"

    async def base_file(self, name: str) -> Path:
        """See `Node.base_file`."""
        return await asyncio.to_thread(self._base_files.path, name)

    async def put_adapter(self, ref: AdapterRef, archive: bytes, sha256: str, fence: int) -> SharedVersion:
        """See `Node.put_adapter`."""
        check_name(ref.name, "name")
        live = self.follower.state.live.get(ref.name)
        if live is not None and fence < live.fence:
            raise ConflictError(f"{ref} is refused: its trainer has lost its lease to another ({live.fence}).")
        async with self._uploading:  # the archive of a staged version never changes; one left by a failed upload may
            await self._versions.check(ref, sha256.lower())
            version = await asyncio.to_thread(self._archives.put, ref, archive, sha256, fence)
            await self._versions.stage(version)
        return version

    async def adapter_file(self, ref: AdapterRef) -> Path:
        """See `Node.adapter_file`."""
        check_name(ref.name, "name")
        return await asyncio.to_thread(self._archives.path, ref)


@asynccontextmanager
async def head(settings: HeadSettings, adapters: NodeAdapters) -> AsyncIterator[Head]:
    """Runs a head until the block ends.

    Raises:
        ConfigError: its folder is used by another process, or NATS cannot be started or reached.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(locked_folder(settings.folder))
        token = settings.token or own_token(folder)
        server = await _own_nats(settings, stack)
        nats = _address(settings, server)
        connection = await stack.enter_async_context(connect(nats, NodeRole.HEAD.value))
        if server is not None:
            await stack.enter_async_context(running(keep_storing(connection, server, folder)))
        node = Head(settings, token, adapters, connection, nats)
        await stack.enter_async_context(node.taking_part(connection))
        with suppress(TimeoutError):  # a client that asks at once must not hear that an adapter is unknown
            async with asyncio.timeout(_FOLLOWS_S):
                await node.follower.followed.wait()
        yield node


async def _own_nats(settings: HeadSettings, stack: AsyncExitStack) -> NatsServer | None:
    if settings.nats_url is not None:
        return None
    return await stack.enter_async_context(nats_server(settings.folder / "nats", settings.host))


def _address(settings: HeadSettings, own: NatsServer | None) -> NatsAddress:
    if own is None:
        return NatsAddress(settings.nats_url or "")
    return NatsAddress(own.url, own.listening.token)
