"""Versions move between copies in memory and the bank's slots, a unit of device work at a time.

Each method that gives an iterator is a job: every `next` of it is one unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.copies import Copies
from mlx_parallm.adapters.slots import Slots, Tenant
from mlx_parallm.adapters.versions import Version
from mlx_parallm.adapters.wants import Told
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair

Extracted = Callable[[AdapterWeights | Exception | None], None]


class Moves:
    """Device thread only.

    Args:
        gone: whether nobody can ask for a version any more.
    """

    def __init__(self, bank: AdapterBank, slots: Slots, copies: Copies, gone: Callable[[Version], bool]) -> None:
        self.staged = self.evicted = 0
        self.stage_seconds = 0.0
        """The last version's, from its first unit to its last."""
        self.bank_bytes = 0
        """Any thread may ask."""
        self._bank = bank
        self._slots = slots
        self._copies = copies
        self._gone = gone

    def stage(self, version: Version, slot: int) -> Iterator[None]:
        """From its copy into a slot, where whoever is there moves out. Raises what the bank's write raises; the copy
        is kept."""
        started = time.monotonic()
        tenant = self._slots.tenant_of(slot)
        self._slots.take(slot)
        if tenant is not None:
            yield from self._evict(tenant)
        weights = self._copies.take(version)
        try:
            yield from self._bank.write(slot, weights)
        except Exception:  # whatever the write ran into: the version is still in no slot, and must not be lost
            self._copies.put(version, weights)
            raise
        self._slots.move_in(version, slot)
        self.staged += 1
        self.bank_bytes = self._bank.nbytes
        self.stage_seconds = time.monotonic() - started

    def grow(self, slot: int) -> Iterator[None]:
        """Until the bank has room for that slot."""
        yield from self._bank.make_room(slot)
        self.bank_bytes = self._bank.nbytes

    def vacate(self, told: Told) -> Iterator[None]:
        """Every version without pins moves out; the bank goes too where none is left. A row may be admitted between two
        units: its version stays, and the bank with it."""
        try:
            for _, tenant in self._slots:
                if not tenant.pins:
                    yield from self._evict(tenant)
                    self._slots.leave(tenant.slot)
        except Exception as error:  # the caller waits for a result; the loop handles the fault
            told(error)
            raise
        if not len(self._slots):
            self.clear()
        told(None)

    def extract(self, version: Version, extracted: Extracted) -> Iterator[None]:
        """A version's weights as float32 numpy, with the ranks and scales it was published with."""
        try:
            pairs: dict[str, LoRAPair] = {}
            if tenant := self._slots.get(version.ref):
                yield from self._bank.read(tenant.slot, version.ranks, pairs)
            elif copy := self._copies.get(version):
                pairs = dict(copy.pairs)
            exported = {path: _exported(pair, version.scales[path]) for path, pair in pairs.items()}
        except Exception as error:  # whoever asked waits for an answer; the loop deals with the fault
            extracted(error)
            raise
        extracted(AdapterWeights(exported) if pairs else None)

    def clear(self) -> None:
        """Forgets what is in the slots, none of them pinned, and gives the bank back."""
        self._slots.clear()
        self._bank.clear()
        self.bank_bytes = 0

    def _evict(self, tenant: Tenant) -> Iterator[None]:
        """A copy is kept, unless nobody can ask for the version, or it is read again."""
        version = tenant.version
        self._slots.move_out(tenant)
        self.evicted += 1
        if self._gone(version) or (self._copies.most == 0 and version.readable):
            return
        pairs: dict[str, LoRAPair] = {}
        yield from self._bank.read(tenant.slot, version.ranks, pairs)
        self._copies.put(version, AdapterWeights(pairs))


def _exported(pair: LoRAPair, scale: float) -> LoRAPair:
    """A pair of any kind as float32 numpy with its published scale."""
    a, b = (np.array(mx.array(factor).astype(mx.float32)) for factor in (pair.a, pair.b))
    return LoRAPair(a, b * np.float32(pair.scale / scale) if pair.scale != scale else b, scale)
