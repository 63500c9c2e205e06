"""AdapterStore decides which versions are in the bank's slots, and moves them between decode steps.

    FILE ──read (worker thread)──▶ COPY ──stage (units of device work)──▶ SLOT ──evict──▶ COPY ──drop──▶ FILE

While a row lives, it pins the slot of its version. A version that requests wait for gets a free slot, or that of the
least recently used version without pins. If all slots stay pinned for `_PATIENCE_S`, one version admits no new rows
until its slot is free.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.slots import Copies, PendingLoad, Slots
from mlx_parallm.adapters.weights import AdapterWeights, Version
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, Residence, completed
from mlx_parallm.errors import AdapterTooLargeError, AdapterUnavailableError, UnknownModelError

T = TypeVar("T")

READ_AHEAD = 2
"""How many of the waiting versions have their files read before there is a slot for them."""

_PATIENCE_S = 1.0
"""How long a version waits for a slot before a version that is in a slot stops admitting rows."""


class AdapterStore:
    """Decides which versions are in the bank's slots, and moves them. Implements `core.DeviceWork`.

    Device thread only, except for the methods that say otherwise. The futures that it returns are completed there.

    Args:
        read: reads a version's weights from its files, on `reader`.
        copies: how many evicted versions to keep in memory.
        wake: called on the reader's thread when a read has ended.
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
        self.copies = Copies(copies, lambda version: version.readable or not registry.needed(version))
        self.slots = Slots(bank, self.copies, self.unreachable)
        self._read = read
        self._reader = reader
        self._wake = wake
        self._loads: dict[AdapterRef, PendingLoad] = {}
        self._requests: Counter[AdapterRef] = Counter()
        self.failures: dict[AdapterRef, Exception] = {}  # versions that requests wait for and that cannot be staged
        self._asked: deque[Iterator[None]] = deque()  # jobs that a caller has asked for
        self._job: Iterator[None] | None = None
        self._make_room = False  # the last version was urgent: grow the bank before the next one comes

    # -- requests and rows -----------------------------------------------------------------------

    def add_request(self, ref: AdapterRef) -> None:
        """Counts a request for this version. Loads that no request waits for are dropped."""
        self._requests[ref] += 1

    def remove_request(self, ref: AdapterRef) -> None:
        self._requests -= Counter([ref])  # which removes counts of zero

    def ready(self, ref: AdapterRef) -> bool:
        """Whether a row with this version may be admitted now. A version that is in no slot is queued for staging."""
        if ref == BASE_ADAPTER:
            return True
        staged = self.slots.get(ref)
        if staged is None and ref not in self._loads and ref not in self.failures:
            if (version := self.registry.version(ref)) is not None:
                self._loads[ref] = PendingLoad(version, time.monotonic())
            else:
                self.failures[ref] = AdapterUnavailableError(f"{ref} was forgotten before the request was served")
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
        """Returns and clears `failures`."""
        failed, self.failures = self.failures, {}
        return failed

    # -- publishing ------------------------------------------------------------------------------

    def stage(
        self, version: Version, weights: AdapterWeights | None = None, *, urgent: bool = False, goes_live: bool = False
    ) -> Future[AdapterRef]:
        """Brings a version into a slot, between decode steps. The future completes when it is there, or fails.

        If every slot is pinned, the future completes anyway. The version is kept as a copy and staged when a row needs
        it, so that publishing never waits for other adapters' rows.

        Args:
            weights: NumPy or MLX arrays; None if its files are to be read.
            urgent: stage it before any other version.
            goes_live: make it live just before the future completes.
        """
        if version.ref == BASE_ADAPTER or self.slots.get(version.ref):
            if goes_live:
                self.registry.flip(version.ref)
            return completed(version.ref)
        load = self._loads.setdefault(version.ref, PendingLoad(version, time.monotonic()))
        load.weights = load.weights or weights
        load.urgent |= urgent
        load.goes_live |= goes_live
        load.futures.append(Future())
        return load.futures[-1]

    def extract(self, version: Version) -> Future[AdapterWeights | None]:
        """See `Slots.extract`. Runs between decode steps."""
        return self._ask(self.slots.extract(version, self._in_memory))

    def evict_idle(self) -> Future[None]:
        """See `Slots.evict_idle`. Runs between decode steps. Evicted versions are staged again on demand."""
        return self._ask(self.slots.evict_idle())

    def _ask(self, job: Generator[None, None, T]) -> Future[T]:
        """Queues a job. The future gets its return value, or its error."""
        done: Future[T] = Future()

        def completing() -> Iterator[None]:
            try:
                done.set_result((yield from job))
            except Exception as error:  # the caller gets it here; the device loop recovers from the fault
                done.set_exception(error)
                raise

        self._asked.append(completing())
        return done

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        """See `core.DeviceWork.waits`."""
        self.copies.purge(self.unreachable)
        for load in list(self._loads.values()):
            if not load.futures and not self._requests[load.version.ref]:
                self._drop(load)
            elif load.reading is not None and load.reading.done():
                self._take_read(load, load.reading)
        if self._job is None:
            self._job = self._next_job()
        return self._job is not None

    @property
    def urgent(self) -> bool:
        """Whether an urgent version waits for its slot."""
        return any(load.urgent for load in self._loads.values())

    def advance(self) -> None:
        """Runs one unit: one group of linears of one slot."""
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None

    def reset(self) -> None:
        """Empties all slots, none of which is pinned. Versions with copies or files are staged again on demand."""
        self._job = None
        self.slots.clear()

    def unload(self) -> None:
        """Frees the bank and all copies for good, when the base model is unloaded. Loads under way fail."""
        for load in list(self._loads.values()):
            self._fail(load, AdapterUnavailableError(f"the base model of {load.version.ref} was unloaded"))
        self.reset()
        self.copies.clear()

    @property
    def bytes_held(self) -> int:
        """The size of the bank. Any thread may ask."""
        return self.slots.nbytes

    def _next_job(self) -> Iterator[None] | None:
        """A job that a caller has asked for, else the staging of the first load that has its weights in memory and can
        have a slot, else the growth of the bank. Also starts reading the files of the first loads."""
        if self._asked:
            return self._asked.popleft()
        loads = sorted(self._loads.values(), key=lambda load: (not load.urgent, load.since))
        for load in loads[:READ_AHEAD]:
            if load.weights is None and load.reading is None and load.version not in self.copies:
                self._start_read(load)
        for load in loads:
            if load.weights is None and load.version not in self.copies:
                continue
            if self.slots.find() is not None:
                return self._stage(load)
            self._finish(load)
            if time.monotonic() - load.since > _PATIENCE_S:
                self.slots.drain_one(most=sum(other.since <= load.since for other in loads))
        make_room, self._make_room = self._make_room, False
        return self.slots.grow() if make_room else None

    def _stage(self, load: PendingLoad) -> Iterator[None]:
        """Looks for the slot when it begins, because rows may have been admitted since the job was chosen."""
        slot, weights = self.slots.find(), load.weights or self.copies.get(load.version)
        if slot is None or weights is None:
            return
        try:
            self.bank.check_room(slot, weights)
        except AdapterTooLargeError as error:
            self._fail(load, error)
            return
        try:
            yield from self.slots.write(slot, load.version, weights)
        except Exception as error:  # the futures get the error; the device loop recovers
            load.complete(error)
            load.faults += 1
            if load.faults > 1:  # its requests have waited for a second attempt; a third would disturb the others again
                self._fail(load, error)
            raise
        load = self._loads.pop(load.version.ref, load)  # a newer load if this one was dropped meanwhile
        self._make_room = load.urgent
        self._finish(load)

    def _finish(self, load: PendingLoad) -> None:
        """Makes the version live if it is to be, and completes the futures."""
        try:
            if load.goes_live:
                self.registry.flip(load.version.ref)
        except UnknownModelError as error:
            load.complete(error)
        else:
            load.complete()

    # -- weights in memory -----------------------------------------------------------------------

    def _start_read(self, load: PendingLoad) -> None:
        """Starts reading a version's files. Fails the load if no file holds its weights any more."""
        if load.version.readable:
            load.reading = self._reader.submit(self._read, load.version)
            load.reading.add_done_callback(lambda _: self._wake())
        else:
            why = "it was unloaded" if load.version.forgotten else "no file holds them"
            self._fail(load, AdapterUnavailableError(f"the weights of {load.version.ref} are lost: {why}"))

    def _take_read(self, load: PendingLoad, read: Future[AdapterWeights]) -> None:
        load.reading = None
        if error := read.exception():
            self._fail(load, AdapterUnavailableError(f"{load.version.ref} cannot be read again: {error}"))
        else:
            load.weights = read.result()

    def _fail(self, load: PendingLoad, error: Exception) -> None:
        if self._requests[load.version.ref]:
            self.failures[load.version.ref] = error
        load.complete(error)
        self._drop(load)

    def _drop(self, load: PendingLoad) -> None:
        """Ends a load. Its weights are kept as a copy if something may still ask for the version."""
        self._loads.pop(load.version.ref, None)
        if load.reading is not None:
            load.reading.cancel()
        if load.weights is not None and not self.unreachable(load.version):
            self.copies.put(load.version, load.weights)

    def _in_memory(self, version: Version) -> AdapterWeights | None:
        """The weights of a version that is in no slot."""
        load = self._loads.get(version.ref)
        return (load.weights if load else None) or self.copies.get(version)

    # -- state -----------------------------------------------------------------------------------

    def version(self, ref: AdapterRef) -> Version | None:
        """The version that rows of `ref` are computed with: the one in the slot that they pin or would get, even if it
        was forgotten since. None if it is in no slot and nothing can ask for it any more."""
        staged = self.slots.get(ref)
        return staged.version if staged else self.registry.version(ref)

    def unreachable(self, version: Version) -> bool:
        """Whether nothing can ask for the version any more."""
        return version.forgotten and not version.leases and not self._requests[version.ref]

    def residence(self, version: Version) -> Residence:
        """Where a version's weights are. Any thread may ask."""
        in_memory = Residence.COPY if self._in_memory(version) else Residence.FILE
        return Residence.SLOT if self.slots.get(version.ref) else in_memory

    def requests(self, ref: AdapterRef) -> int:
        """How many requests for a version the engine has, rollouts and evaluations among them. Any thread may ask."""
        return self._requests[ref]

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters that have rows, and adapters that only have waiting requests. Any thread may ask."""
        running = {ref.name for ref, staged in self.slots if staged.pins}
        requested = {ref.name for ref in self._requests.copy() if ref != BASE_ADAPTER}
        return tuple(sorted(running)), tuple(sorted(requested - running))

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, pins and copies do not agree."""
        self.slots.check_integrity(moving=self._job is not None)
        for ref, staged in self.slots:
            assert ref not in self._loads
            assert not staged.pins or self._requests[ref] > 0
        assert all(count > 0 for count in self._requests.values())
