"""Versions waiting for a bank slot, and the jobs that move weights between memory and the bank.

A job is a generator. Every `next` runs one unit of device work, short enough to run between two decode steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.slots import Copies, Slots
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version
from mlx_parallm.core import AdapterRef

READ_AHEAD = 2
"""Versions whose files are read before there is a slot for them."""


@dataclass(eq=False, slots=True)
class PendingLoad:
    """A version that has waited for a slot since `since` (`time.monotonic`).

    `urgent`: staged before others that wait. `faults`: times that staging it failed on the device. `futures`: completed
    when it is staged, or cannot be.
    """

    version: Version
    since: float
    urgent: bool = False
    faults: int = 0
    futures: list[Future[None]] = field(default_factory=list)

    def future(self) -> Future[None]:
        """A future that `complete` completes."""
        self.futures.append(Future())
        return self.futures[-1]

    def complete(self, error: Exception | None = None) -> None:
        """Completes the futures, with `error` if there is one."""
        futures, self.futures = self.futures, []
        for future in futures:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class PendingLoads:
    """At most one pending load for each version."""

    def __init__(self) -> None:
        self._loads: dict[AdapterRef, PendingLoad] = {}

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def get(self, ref: AdapterRef) -> PendingLoad | None:
        return self._loads.get(ref)

    def add(self, version: Version, urgent: bool = False) -> PendingLoad:
        """The pending load of this version; a new one if there is none."""
        return self._loads.setdefault(version.ref, PendingLoad(version, time.monotonic(), urgent))

    def remove(self, ref: AdapterRef) -> None:
        """Removes a load, if it is still there."""
        self._loads.pop(ref, None)

    def remove_unused(self, requests: Callable[[AdapterRef], int]) -> None:
        """Removes loads that no future and no request waits for. `requests`: how many requests use a version."""
        for ref, load in list(self._loads.items()):
            if not load.futures and not requests(ref):
                del self._loads[ref]

    @property
    def urgent(self) -> bool:
        return any(load.urgent for load in self._loads.values())

    def in_order(self) -> list[PendingLoad]:
        """The urgent ones first, then by age, oldest first."""
        return sorted(self._loads.values(), key=lambda load: (not load.urgent, load.since))

    def to_read(self) -> list[PendingLoad]:
        """The first `READ_AHEAD` loads in order: their weights are to be read into memory now."""
        return self.in_order()[:READ_AHEAD]

    def up_to(self, load: PendingLoad) -> int:
        """How many loads are at least as old as this one, itself included."""
        return sum(other.since <= load.since for other in self._loads.values())


class Transfers:
    """Jobs that move weights between copies in memory and slots of the bank. Device thread only.

    `staged`, `evicted`: totals. `stage_seconds`: time from the first to the last unit for the version staged last.
    `bank_bytes`: the bank's size, which any thread may read.

    Args:
        unreachable: whether nothing can ask for a version any more, so that its weights can be dropped.
    """

    def __init__(self, bank: AdapterBank, slots: Slots, copies: Copies, unreachable: Callable[[Version], bool]) -> None:
        self.staged = self.evicted = 0
        self.stage_seconds = 0.0
        self.bank_bytes = 0
        self._bank = bank
        self._slots = slots
        self._copies = copies
        self._unreachable = unreachable

    def stage(self, version: Version, slot: int) -> Iterator[None]:
        """Moves a version from its copy into a slot, after evicting the version in it. If the write fails, the copy is
        kept."""
        started = time.monotonic()
        yield from self._evict(slot)
        weights = self._copies.take(version)
        try:
            yield from self._bank.write(slot, weights)
        except Exception:  # the version is in no slot yet, and its weights must not be lost
            self._copies.put(version, weights)
            raise
        self._slots.fill(slot, version)
        self.staged += 1
        self.bank_bytes = self._bank.nbytes
        self.stage_seconds = time.monotonic() - started

    def grow(self, slot: int) -> Iterator[None]:
        """Grows the bank until it has room for `slot`."""
        yield from self._bank.make_room(slot)
        self.bank_bytes = self._bank.nbytes

    def evict_idle(self) -> Generator[None, None, None]:
        """Evicts every version without pins, and frees the bank if no version is left. A row may be admitted between
        two units; then its version stays, and the bank with it."""
        for _, staged in self._slots:
            if not staged.pins:
                yield from self._evict(staged.slot)
                self._slots.release(staged.slot)
        if not len(self._slots):
            self.clear()

    def extract(self, version: Version) -> Generator[None, None, AdapterWeights | None]:
        """Returns a version's weights as float32 NumPy arrays, with the ranks and scales it was published with. None if
        they are neither in a slot nor in a copy."""
        pairs: dict[str, LoRAPair] = {}
        if staged := self._slots.get(version.ref):
            yield from self._bank.read(staged.slot, version.ranks, pairs)
        elif copy := self._copies.get(version):
            pairs = dict(copy.pairs)
        exported = {path: _exported(pair, version.scales[path]) for path, pair in pairs.items()}
        return AdapterWeights(exported) if pairs else None

    def clear(self) -> None:
        """Empties the slots, none of which may be pinned, and frees the bank."""
        self._slots.clear()
        self._bank.clear()
        self.bank_bytes = 0

    def _evict(self, slot: int) -> Iterator[None]:
        """Reserves a slot, and keeps a copy of the version in it. There is no copy if the version is unreachable, or if
        copies are switched off and its files can be read again."""
        version = self._slots.reserve(slot)
        if version is None:
            return
        self.evicted += 1
        if self._unreachable(version) or (self._copies.most == 0 and version.readable):
            return
        pairs: dict[str, LoRAPair] = {}
        yield from self._bank.read(slot, version.ranks, pairs)
        self._copies.put(version, AdapterWeights(pairs))


def _exported(pair: LoRAPair, scale: float) -> LoRAPair:
    """A pair of MLX or NumPy arrays as float32 NumPy, rescaled to `scale`."""
    a, b = (np.array(mx.array(factor).astype(mx.float32)) for factor in (pair.a, pair.b))
    return LoRAPair(a, b * np.float32(pair.scale / scale) if pair.scale != scale else b, scale)
