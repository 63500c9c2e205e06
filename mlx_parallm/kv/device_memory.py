"""DeviceMemory: who holds the device's memory, what the KV pool may take, and who gives way when memory is short.

    limit ─┬─ weights, MLX's cached buffers, the arrays of a forward pass
           └─ budget ─┬─ reserved: adapters, optimizers, the running micro-step
                      └─ KV pool: all that is left ─┬─ blocks that rows read
                                                    ├─ cached prefixes
                                                    └─ free blocks

Rows take free blocks first. When there are none and the pool may not grow, memory is taken in this order:

    1. cached prefixes, the least recently used first. If all of them together are not enough, they stay.
    2. rollouts, the youngest first. A row that gives way waits, and is computed again later.
    3. other rows, the youngest first.
    4. A request is refused if it would not fit even if nobody else held memory.

When the reserved part grows, the KV pool gives back free blocks and cached prefixes between units. What rows read stays
with them; they give way when the next row needs a block. A row that is alone may use the reserved part too, so that
every request that fits the budget is served.

While the machine is short of memory (`core.machine`), no cached prefixes are kept, and the pool gives back what rows do
not use.

Base models that are loaded side by side share one budget. Each has a DeviceMemory of its own, which counts what the
others hold as taken. Free blocks and cached prefixes of the others are given back at once when a row needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

_POOL_SHARE = 0.8
"""Share of the default budget in what the weights and MLX's cached buffers leave of the limit."""
_CPU_SHARE = 0.25
"""Largest share of RAM that the default budget takes on a CPU."""


def default_budget(limit: int, buffers: int, weights: int, cpu_ram: int | None) -> int:
    """The budget of a device without a configured one, in bytes.

    Args:
        limit: what MLX may take.
        buffers: what MLX may keep of it in freed buffers.
        weights: size of the base model.
        cpu_ram: the machine's memory if MLX computes on the CPU, else None.
    """
    free = int(_POOL_SHARE * max(limit - buffers - weights, 0))
    return free if cpu_ram is None else min(free, int(_CPU_SHARE * cpu_ram))


class MemoryAccount(StrEnum):
    """What memory is held for. All but the weights are part of the budget; of DRAFT_MODEL, what are not weights."""

    WEIGHTS = "weights"
    ROWS = "rows"
    PREFIXES = "cached_prefixes"
    FREE_BLOCKS = "free_blocks"
    ADAPTERS = "adapters"
    OPTIMIZER = "optimizer"
    MICRO_STEP = "micro_step"
    DRAFT_MODEL = "draft_model"


_RESERVED = (MemoryAccount.ADAPTERS, MemoryAccount.OPTIMIZER, MemoryAccount.MICRO_STEP)
_POOL = (MemoryAccount.ROWS, MemoryAccount.PREFIXES, MemoryAccount.FREE_BLOCKS)


class DeviceMemory:
    """The accounts of the device's memory. Device thread only; it reads figures and uses no arrays.

    Attributes:
        budget_bytes: what the KV pool, adapters and training share.
        keeps_prefixes: False while the machine is short of memory.
        give_back: called to free blocks and cached prefixes until `excess` is 0, or none are left.

    Args:
        sharing: of the base models that are loaded, which share the budget. Empty for the first one.
    """

    def __init__(self, budget_bytes: int, sharing: list[DeviceMemory] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.keeps_prefixes = True
        self.give_back: Callable[[], object] = lambda: None
        self._accounts: dict[MemoryAccount, Callable[[], int]] = {}
        self._sharing = [] if sharing is None else sharing
        self._sharing.append(self)
        self._asked = 0  # bytes that another base model needs now

    # -- several base models ---------------------------------------------------------------------

    def leave(self) -> None:
        """Ends the sharing, when the base model is unloaded."""
        self._sharing.remove(self)

    def keep_prefixes(self, keep: bool) -> None:
        """Whether this base model, its draft model and all others keep cached prefixes."""
        for each in self._sharing:
            each.keeps_prefixes = keep

    def ask_others(self, nbytes: int, must: bool) -> None:
        """Has other base models give back memory, so that `nbytes` more fit the budget here.

        Args:
            must: ask all. Otherwise only those are asked that hold more than an equal part of the budget, and only up
                to an equal part for this one. So nobody's cached prefixes keep the others from having any.
        """
        part = self.budget_bytes // len(self._sharing)
        if not must and self._held + nbytes > part:
            return
        for other in self._others:
            if must or other._held > part:
                other._asked = nbytes
                try:
                    other.give_back()
                finally:
                    other._asked = 0

    @property
    def _others(self) -> list[DeviceMemory]:
        return [other for other in self._sharing if other is not self]

    @property
    def _held(self) -> int:
        return self._sum(_POOL) + self._sum(_RESERVED)

    def open_account(self, account: MemoryAccount, read: Callable[[], int]) -> None:
        """Sets the function that returns the bytes of an account, in place of an earlier one."""
        self._accounts[account] = read

    # -- figures ---------------------------------------------------------------------------------

    def bytes_by_account(self) -> Mapping[MemoryAccount, int]:
        """What each account holds now."""
        return {account: read() for account, read in self._accounts.items()}

    @property
    def reserved(self) -> int:
        """Bytes of the budget that adapters, training and other base models hold now, so that rows find less memory."""
        return self._sum(_RESERVED) + self._asked + sum(other._held for other in self._others)

    @property
    def excess(self) -> int:
        """Bytes by which the accounts exceed the budget, or 0."""
        return max(0, self._sum(_POOL) + self.reserved - self.budget_bytes)

    def pool_limit(self, alone: bool) -> int:
        """Bytes that the KV pool may take for a row. `alone`: there is no other row."""
        return self.budget_bytes - (sum(other._sum(_POOL) for other in self._others) if alone else self.reserved)

    def _sum(self, accounts: Sequence[MemoryAccount]) -> int:
        return sum(self._accounts[account]() for account in accounts if account in self._accounts)

    def check_integrity(self) -> None:
        """Raises AssertionError if an account is below zero, or if more than the budget is held and the KV pool keeps
        cached prefixes nevertheless."""
        held = self.bytes_by_account()
        assert all(number >= 0 for number in held.values()), held
        kept = held.get(MemoryAccount.PREFIXES, 0)
        assert not kept or held[MemoryAccount.FREE_BLOCKS] >= self.excess, (held, self.budget_bytes)
