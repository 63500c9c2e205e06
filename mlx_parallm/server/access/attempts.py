"""Finds the key that a client sends. Who sends too many wrong keys has to wait, so that a short one cannot be
guessed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from mlx_parallm.core.machine import seconds_with_sleep
from mlx_parallm.errors import OverloadedError
from mlx_parallm.server.access.keys import KeyRing, NamedKey, digest

MOST_WRONG, WITHIN_S = 10, 60.0
"""How many different wrong keys one address may send within so many seconds. A program that keeps sending an old key
makes nobody wait."""
UNGUESSABLE = 24
"""Keys of at least so many characters, such as those that `keys add` makes, never wait."""
MAX_ADDRESSES, MAX_KNOWN = 1000, 10_000


class Attempts:
    """Used on the event loop's thread only.

    Invariant: wrong keys of at most `MAX_ADDRESSES` addresses and at most `MAX_KNOWN` right ones; the oldest are
    forgotten.
    """

    def __init__(self, ring: KeyRing, clock: Callable[[], float] = seconds_with_sleep) -> None:
        self.ring = ring
        self._clock = clock
        self._wrong: OrderedDict[str, dict[str, float]] = OrderedDict()  # when each was sent, by its digest
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()  # right keys of addresses, by their digests

    def find(self, address: str, secret: bytes) -> NamedKey | None:
        """The key with this secret; None if there is none.

        Raises:
            OverloadedError: the address has sent too many wrong keys, and has not sent this one before.
        """
        sha256 = digest(secret)
        key, wrong = self.ring.of_digest(sha256), self._recent(address)
        safe = key is not None and (len(secret) >= UNGUESSABLE or (address, sha256) in self._known)
        if len(wrong) >= MOST_WRONG and sha256 not in wrong and not safe:
            wait_s = math.ceil(min(wrong.values()) + WITHIN_S - self._clock())
            raise OverloadedError(f"Too many wrong keys; try again in {wait_s} s.", wait_s)
        if key is None:
            self._wrong[address] = {**wrong, sha256: self._clock()}
            self._wrong.move_to_end(address)
        else:
            self._known[address, sha256] = None
            self._known.move_to_end((address, sha256))
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return key

    def _recent(self, address: str) -> dict[str, float]:
        since = self._clock() - WITHIN_S
        return {sha256: at for sha256, at in self._wrong.get(address, {}).items() if at > since}
