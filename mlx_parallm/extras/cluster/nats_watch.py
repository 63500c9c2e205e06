"""Starts the head's NATS server again when it does not store anything any more.

    probe every stream ─▶ stored: again after `PROBE_S`
                     └─ not for `STUCK_S`, though the disk has room ─▶ kill; `NatsServer.keep_up` starts it again

A stream that NATS could not write once takes no message until the server is started anew, also when the disk has room
again. One that stands still is found in the same way. A full disk is left alone, because a restart does not help there.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from nats.errors import Error as NatsError

from mlx_parallm.extras.cluster.connection import Connection
from mlx_parallm.extras.cluster.nats_server import NatsServer

PROBE_S, STUCK_S = 5.0, 8.0
RETURN_S = 16.0
"""How long a server may take to store again after its start, in seconds. `members._RETURN_S` says why it takes long."""
_AGAIN_S = 1.0
_ROOM_BYTES = 16 << 20

_log = logging.getLogger(__name__)


async def keep_storing(connection: Connection, server: NatsServer, folder: Path) -> None:
    """Watches the server until it is cancelled. `folder`: where it stores."""
    stored_at, warned = time.monotonic(), False
    while True:
        try:
            await connection.probe()
        except NatsError as error:
            if time.monotonic() > max(stored_at + STUCK_S, server.ready_at + RETURN_S):
                if await asyncio.to_thread(_is_full, folder):
                    if not warned:
                        _log.error("the disk of %s is full: nothing can be published or collected now", folder)
                    warned = True
                else:
                    _log.error("the NATS server has stored nothing for %g s (%s)", STUCK_S, error)
                    server.kill()
            await asyncio.sleep(_AGAIN_S)
        else:
            stored_at, warned = time.monotonic(), False
            await asyncio.sleep(PROBE_S)


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _ROOM_BYTES
