"""Which version is in which slot of the bank, and which one makes way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_parallm.adapters.versions import Version
from mlx_parallm.core import AdapterRef


@dataclass(eq=False, slots=True)
class Tenant:
    """A version in a slot, since and last used at seconds of `time.monotonic`. `pins`: its live rows.

    `yielding`: it admits no new rows.
    """

    version: Version
    slot: int
    since: float
    used: float
    pins: int = 0
    yielding: bool = False

    def pin(self, rows: int) -> None:
        """One row more (1) or less (-1)."""
        self.pins += rows
        self.yielding = self.yielding and rows < 0
        self.used = time.monotonic()


class Slots:
    """Slots 1 … count. A slot is taken while it has a tenant, and while one moves in or out."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tenants: dict[AdapterRef, Tenant] = {}
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[tuple[AdapterRef, Tenant]]:
        """Of a copy: other threads may look while the device thread changes it."""
        return iter(self._tenants.copy().items())

    def get(self, ref: AdapterRef) -> Tenant | None:
        return self._tenants.get(ref)

    def tenant_of(self, slot: int) -> Tenant | None:
        return next((tenant for tenant in self._tenants.values() if tenant.slot == slot), None)

    def find(self) -> int | None:
        """A free slot, or the least recently used one without pins; a forgotten version's first."""
        free = next((slot for slot in range(1, self.count + 1) if slot not in self._taken), None)
        if free is not None:
            return free
        idle = [tenant for tenant in self._tenants.values() if not tenant.pins]
        least = min(idle, key=lambda tenant: (not tenant.version.forgotten, tenant.used), default=None)
        return None if least is None else least.slot

    def take(self, slot: int) -> None:
        """Nobody else gets it from here on."""
        self._taken.add(slot)

    def move_in(self, version: Version, slot: int) -> None:
        """Into a slot that is taken."""
        now = time.monotonic()
        self._tenants[version.ref] = Tenant(version, slot, since=now, used=now)

    def move_out(self, tenant: Tenant) -> None:
        """The slot stays taken."""
        del self._tenants[tenant.version.ref]

    def leave(self, slot: int) -> None:
        """A slot whose tenant has moved out is free."""
        self._taken.discard(slot)

    def clear(self) -> None:
        """Nothing is pinned."""
        assert not any(tenant.pins for tenant in self._tenants.values())
        self._tenants.clear()
        self._taken.clear()

    def make_one_yield(self, most: int) -> None:
        """The tenant that has been in for longest admits no more rows, where fewer than `most` yield already."""
        staying = [tenant for tenant in self._tenants.values() if not tenant.yielding]
        if staying and len(self._tenants) - len(staying) < most:
            min(staying, key=lambda tenant: tenant.since).yielding = True

    @property
    def pinned(self) -> int:
        return sum(tenant.pins > 0 for _, tenant in self)

    def check_integrity(self, moving: bool) -> None:
        """Raises AssertionError when tenants and slots do not agree. `moving`: a slot is being written."""
        slots = [tenant.slot for tenant in self._tenants.values()]
        assert len(slots) == len(set(slots))
        assert set(slots) <= self._taken <= set(range(1, self.count + 1))
        assert moving or set(slots) == self._taken
        for ref, tenant in self._tenants.items():
            assert tenant.version.ref == ref
            assert tenant.pins >= 0
