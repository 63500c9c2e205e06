"""AdapterStore decides which versions are in the bank's slots, and moves them between decode steps.

    FILE ──read (worker thread)──▶ COPY ──stage (units of device work)──▶ SLOT ──evict──▶ COPY ──▶ FILE

A row pins its version's slot while it lives. A version that requests wait for gets a free slot, or that of the least
recently used version without pins. If all slots stay pinned for `_PATIENCE_S`, one version admits no new rows until
its slot is free.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.slots import BackgroundReads, Copies, Slots
from mlx_parallm.adapters.staging import PendingLoad, PendingLoads, Transfers
from mlx_parallm.adapters.weights import AdapterWeights, Version
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, Residence
from mlx_parallm.core.futures import completed
from mlx_parallm.errors import AdapterUnavailableError

T = TypeVar("T")

_PATIENCE_S = 1.0
"""How long a version waits for a slot before another one is drained."""


class AdapterStore:
    """Implements `core.DeviceWork`. Device thread only, except for the methods that say otherwise.

    Futures that it returns are completed on the device thread.

    Args:
        read, reader, wake: see `BackgroundReads`.
        copies: evicted versions to keep in memory.
    """

    def __init__(
        self,
        bank: AdapterBank,
        registry: AdapterRegistry,
        read: Callable[[Version], AdapterWeights],
        reader: Executor,
        copies: int,
        wake: Callable[[], None],
    ) -> None:
        self.bank = bank
        self.registry = registry
        self.slots = Slots(bank.slots)
        self.copies = Copies(copies, self._may_drop)
        self.transfers = Transfers(bank, self.slots, self.copies, self._unreachable)
        self._reads = BackgroundReads(read, reader, wake)
        self._loads = PendingLoads()
        self._requests: Counter[AdapterRef] = Counter()
        self._failed: dict[AdapterRef, Exception] = {}
        self._asked: deque[Iterator[None]] = deque()  # jobs that a caller has asked for
        self._job: Iterator[None] | None = None
        self._make_room = False  # the last version was urgent: grow the bank before the next one comes

    # -- requests and rows -----------------------------------------------------------------------

    def add_request(self, ref: AdapterRef) -> None:
        """Counts a request for this version. Loads that no request waits for are dropped."""
        self._requests[ref] += 1

    def remove_request(self, ref: AdapterRef) -> None:
        self._requests[ref] -= 1
        if not self._requests[ref]:
            del self._requests[ref]

    def ready(self, ref: AdapterRef) -> bool:
        """Whether a row with this version may be admitted now. If it is in no slot, it is queued for staging."""
        if ref == BASE_ADAPTER:
            return True
        staged = self.slots.get(ref)
        if staged is None and ref not in self._loads and ref not in self._failed:
            self._load(ref)
        return staged is not None and not (staged.draining and self._loads)

    def pin(self, ref: AdapterRef) -> int:
        """Returns the slot of a version that is `ready`, and keeps the version there until `unpin`."""
        staged = self.slots.get(ref)
        if staged is None:
            assert ref == BASE_ADAPTER
            return 0
        staged.pin()
        return staged.slot

    def unpin(self, ref: AdapterRef) -> None:
        if staged := self.slots.get(ref):
            staged.unpin()

    def take_failures(self) -> dict[AdapterRef, Exception]:
        """Versions that requests wait for and that cannot be staged, with the reasons. Each is returned once."""
        failed, self._failed = self._failed, {}
        return failed

    # -- publishing ------------------------------------------------------------------------------

    def stage(self, version: Version, weights: AdapterWeights | None, urgent: bool = False) -> Future[None]:
        """Brings a version into a slot, between decode steps. The future completes when it is there, or fails.

        If every slot is pinned, the future completes anyway. The version is kept as a copy and staged when a row needs
        it, so that publishing never waits for other adapters' rows.

        Args:
            weights: NumPy or MLX arrays; None if its files are to be read.
            urgent: stage it before any other version.
        """
        if version.ref == BASE_ADAPTER or self.slots.get(version.ref):
            return completed(None)
        if weights is not None:
            self._keep(version, weights)
        return self._loads.add(version, urgent).future()

    def extract(self, version: Version) -> Future[AdapterWeights | None]:
        """See `Transfers.extract`. Runs between decode steps."""
        return self._ask(self.transfers.extract(version))

    def evict_idle(self) -> Future[None]:
        """See `Transfers.evict_idle`. Runs between decode steps. Evicted versions are staged again on demand."""
        return self._ask(self.transfers.evict_idle())

    def _ask(self, job: Generator[None, None, T]) -> Future[T]:
        done: Future[T] = Future()
        self._asked.append(_completing(done, job))
        return done

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        """See `core.DeviceWork.waits`."""
        self._take_reads()
        self.copies.purge(self._unreachable)
        self._loads.remove_unused(self._requests.__getitem__)
        if self._job is None:
            self._job = self._next_job()
        return self._job is not None

    @property
    def urgent(self) -> bool:
        """Whether an urgent version waits for its slot."""
        return self._loads.urgent

    def advance(self) -> None:
        """Runs one unit: one group of linears of one slot."""
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None

    @property
    def bytes_held(self) -> int:
        """The size of the bank. Any thread may ask."""
        return self.transfers.bank_bytes

    def reset(self) -> None:
        """Empties all slots, none of which is pinned. Versions with copies or files are staged again on demand."""
        self._job = None
        self.transfers.clear()

    def _next_job(self) -> Iterator[None] | None:
        """The next job: one that a caller has asked for, else the staging of the first load whose weights are in memory
        and that can have a slot, else the growth of the bank. Also starts reading the files of the first loads."""
        if self._asked:
            return self._asked.popleft()
        for load in self._loads.to_read():
            self._fetch(load)
        for load in [load for load in self._loads.in_order() if load.version in self.copies]:
            if self.slots.find() is not None:
                return self._stage(load)
            load.complete()
            if time.monotonic() - load.since > _PATIENCE_S:
                self.slots.drain_one(most=self._loads.up_to(load))
        return self._room_for_next() if self._make_room else None

    def _room_for_next(self) -> Iterator[None] | None:
        """Grows the bank for the next urgent version, because growing takes longer than writing a slot."""
        self._make_room = False
        slot = self.slots.find()
        return None if slot is None or self.bank.has_room(slot) else self.transfers.grow(slot)

    def _stage(self, load: PendingLoad) -> Iterator[None]:
        """Looks for the slot when it begins, because rows may have been admitted since the job was chosen."""
        slot = self.slots.find()
        if slot is None or load.version not in self.copies:
            return
        try:
            yield from self.transfers.stage(load.version, slot)
        except Exception as error:  # the futures get the error; the device loop recovers
            load.complete(error)
            load.faults += 1
            if load.faults > 1:  # its requests have waited for a second attempt; a third would disturb the others again
                self._fail(load, error)
            raise
        self._loads.remove(load.version.ref)
        self._make_room = load.urgent
        load.complete()

    # -- weights in memory -----------------------------------------------------------------------

    def _load(self, ref: AdapterRef) -> None:
        version = self.registry.version(ref)
        if version is None:
            self._failed[ref] = AdapterUnavailableError(f"{ref} was forgotten before the request was served")
        else:
            self._loads.add(version)

    def _fetch(self, load: PendingLoad) -> None:
        """Starts reading a version that is not in memory. Fails it if its files hold other weights now."""
        version = load.version
        if version in self.copies or version in self._reads:
            return
        if version.readable:
            self._reads.start(version)
        else:
            lost = "was unloaded meanwhile" if version.forgotten else "is lost: its files hold other weights by now"
            self._fail(load, AdapterUnavailableError(f"{version.ref} {lost}"))

    def _take_reads(self) -> None:
        for ref, read in self._reads.take():
            load = self._loads.get(ref)
            if load is None:
                continue
            if isinstance(read, BaseException):
                self._fail(load, AdapterUnavailableError(f"{ref} cannot be read again: {read}"))
            else:
                self._keep(load.version, read)

    def _keep(self, version: Version, weights: AdapterWeights) -> None:
        """Keeps weights as they were published. `extract` restores their ranks and scales."""
        version.ranks = {path: pair.rank for path, pair in weights.pairs.items()}
        version.scales = {path: pair.scale for path, pair in weights.pairs.items()}
        self.copies.put(version, weights)

    def _unreachable(self, version: Version) -> bool:
        return version.forgotten and not version.leases and not self._requests[version.ref]

    def _may_drop(self, version: Version) -> bool:
        soon = any(load.version is version for load in self._loads.to_read())
        return not soon and (version.readable or not self.registry.needed(version))

    def _fail(self, load: PendingLoad, error: Exception) -> None:
        ref = load.version.ref
        self._loads.remove(ref)
        if self._requests[ref]:
            self._failed[ref] = error
        load.complete(error)

    # -- state -----------------------------------------------------------------------------------

    def residence(self, version: Version) -> Residence:
        """Where a version's weights are. Any thread may ask."""
        if self.slots.get(version.ref):
            return Residence.SLOT
        return Residence.COPY if version in self.copies else Residence.FILE

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters that have rows, and adapters that only have waiting requests. Any thread may ask."""
        running = {ref.name for ref, staged in self.slots if staged.pins}
        requested = {ref.name for ref in self._requests.copy() if ref != BASE_ADAPTER}
        return tuple(sorted(running)), tuple(sorted(requested - running))

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, pins and copies do not agree."""
        self.slots.check_integrity(moving=self._job is not None)
        for ref, staged in self.slots:
            assert staged.version not in self.copies
            assert not staged.pins or self._requests[ref] > 0
        assert all(count > 0 for count in self._requests.values())


def _completing(done: Future[T], job: Generator[None, None, T]) -> Iterator[None]:
    """Runs `job`, and completes `done` with its return value or its error."""
    try:
        result = yield from job
    except Exception as error:  # the caller gets it here; the device loop recovers from the fault
        done.set_exception(error)
        raise
    done.set_result(result)
