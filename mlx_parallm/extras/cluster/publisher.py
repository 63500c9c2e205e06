"""Publisher: makes a new adapter version live everywhere.

upload ─▶ staged ─▶ every node that serves fetches it and says that it holds it ─▶ compare-and-set of the live version
"""

from __future__ import annotations

import asyncio
import logging
import time

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.cluster.cards import SharedVersion
from mlx_parallm.extras.cluster.head_client import HeadClient
from mlx_parallm.extras.cluster.members import Members
from mlx_parallm.extras.cluster.versions import LiveVersion, Versions

_PATIENCE_S, _CHECK_S = 10.0, 0.01

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes from this node.

    Args:
        patience_s: how long a node that serves may take to hold a version before the others go on without it.
    """

    def __init__(
        self, client: HeadClient, versions: Versions, members: Members, patience_s: float = _PATIENCE_S
    ) -> None:
        self._client = client
        self._versions = versions
        self._members = members
        self._patience_s = patience_s

    async def publish(self, ref: AdapterRef, archive: bytes, fence: int = 0) -> LiveVersion:
        """Publishes a version. `archive`: see `archive.pack`. `fence`: the number of the trainer's lease.

        Raises:
            HeadUnreachableError, StorageError: the head or NATS does not answer. Doing so again is safe.
            ConflictError: another version went live meanwhile, or the lease is lost.
        """
        live = await self._versions.live(ref.name)
        if live is not None and live.version.ref == ref:
            return live  # an earlier attempt came to its end after all
        return await self.make_live(await self._client.put_adapter(ref, archive, fence), live)

    async def make_live(self, version: SharedVersion, after: LiveVersion | None) -> LiveVersion:
        """Makes a staged version live when the nodes hold it. Raises what `Versions.go_live` does."""
        await self._held(version.ref)
        return await self._versions.go_live(version, after)

    async def _held(self, ref: AdapterRef) -> None:
        """Returns when every node that serves holds the version, or after `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while missing := self._missing(ref):
            if time.monotonic() > deadline:
                _log.warning("%s goes live although it is missing on %s", ref, ", ".join(missing))
                return
            await asyncio.sleep(_CHECK_S)

    def _missing(self, ref: AdapterRef) -> list[str]:
        serving = [member.info for member in self._members.present() if member.info.ready]
        return [info.id for info in serving if str(ref) not in info.holds] if serving else ["any node"]
