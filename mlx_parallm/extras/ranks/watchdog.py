"""Watches the other ranks. A collective operation waits for all ranks without end, so a rank that is gone, or stands
still, has to be noticed beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mlx_parallm.extras.ranks.joining import Peer

_PULSE_S = 1.0
PATIENCE_S = 7.0
"""A rank that was not heard for so long, in seconds, counts as lost. Ranks send a byte every second."""


class Watchdog:
    """A thread for each peer that calls `on_lost` with what happened, once, when the peer is lost.

    `patience`: see `PATIENCE_S`.
    """

    def __init__(self, peer: Peer, on_lost: Callable[[str], None], patience: float = PATIENCE_S) -> None:
        self._peer = peer
        self._on_lost = on_lost
        self._patience = patience
        self._pulse = min(_PULSE_S, patience / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watches rank {peer.rank}", daemon=True)

    def start(self) -> None:
        self._peer.pulse.settimeout(self._pulse)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch, before this rank closes its connections."""
        self._stopped.set()

    def _watch(self) -> None:
        heard = sent = time.monotonic()
        lost = ""
        while not lost and not self._stopped.is_set():
            try:
                if time.monotonic() - sent >= self._pulse or sent == heard:
                    self._peer.pulse.sendall(b".")
                    sent = time.monotonic()
                if self._peer.pulse.recv(1 << 10):
                    heard = time.monotonic()
                else:
                    lost = "its connection was closed"
            except TimeoutError:
                if time.monotonic() - heard > self._patience:
                    lost = f"it was not heard for {self._patience:g} s"
            except OSError as error:
                lost = f"its connection failed: {error}"
        if lost and not self._stopped.is_set():
            self._on_lost(f"rank {self._peer.rank} is lost: {lost}")
