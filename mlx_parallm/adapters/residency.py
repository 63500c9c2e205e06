"""AdapterStore decides where the weights of each version are, and moves them between decode steps.

    FILE ──read (worker thread)──▶ COPY ──stage (units of device work)──▶ SLOT ──evict──▶ COPY ──drop──▶ FILE

While a sequence runs, it pins the slot of its version. A version that requests wait for gets a free slot, or that of
the least recently used version without pins. If it has waited for `_PATIENCE_S` and new sequences keep the slots
pinned, one version in a slot admits no more of them until its slot is free. So each version gets a slot after that time
and about the time of two answers, whatever other versions are asked for.

A job moves weights. It is a generator, and each `next` runs one unit of device work, short enough to run between two
decode steps. A fault of one empties all slots, so a version that no file holds keeps a copy while it is in its slot.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TypeVar

from mlx_parallm.adapters.bank import AdapterBank, exported
from mlx_parallm.adapters.cards import Residence
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.device import completed
from mlx_parallm.errors import AdapterTooLargeError, AdapterUnavailableError, UnknownModelError

T = TypeVar("T")

Job = Generator[None, None, None]

READ_AHEAD = 2
"""How many of the waiting versions have their files read before there is a slot for them."""

_PATIENCE_S = 1.0
"""How long a version waits for a slot before a version that is in a slot stops admitting sequences."""


@dataclass(eq=False, slots=True)
class Resident:
    """Where the weights of a version are, and its wait for a slot. With neither `slot` nor `weights`, they are in its
    files only.

    Attributes:
        slot: the slot that it is in, None if it is in none.
        since: when it entered its slot or, while it waits, when it began to wait (`time.monotonic`).
        weights: in memory and unpadded: those that it was published with, that were read from its files, or that it
            had in its slot. None while it is in a slot and can be read from its files again.
        ranks, scales, rslora: of its pairs, by path, when it was published. In a slot, each scale is 1.
        joined: when a sequence began to use its slot last.
        used: when a sequence used its slot last, or when it left the slot.
        pins: number of running sequences that use its slot.
        draining: it admits no new sequences, so that another version can have the slot.
        refused: since when a sequence waits because it is draining; 0 if none does.
        urgent: it is staged before others that wait.
        goes_live: it becomes the live version of its name as soon as it is staged.
        reading: the read of its files that is under way.
        futures: completed when the version is staged, or cannot be.
        faults: how often staging it has failed on the device.
    """

    version: Version
    slot: int | None = None
    since: float = 0.0
    weights: AdapterWeights | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    rslora: bool = False
    joined: float = 0.0
    used: float = 0.0
    pins: int = 0
    draining: bool = False
    refused: float = 0.0
    urgent: bool = False
    goes_live: bool = False
    reading: Future[AdapterWeights] | None = None
    futures: list[Future[AdapterRef]] = field(default_factory=list)
    faults: int = 0

    def complete(self, error: Exception | None = None) -> None:
        """Completes the futures, with `error` if there is one. Afterwards, its staging makes it live no more."""
        futures, self.futures, self.goes_live = self.futures, [], False
        for future in futures:
            if error is None:
                future.set_result(self.version.ref)
            else:
                future.set_exception(error)


class AdapterStore:
    """Decides which versions are in the bank's slots, and moves them. Implements `core.DeviceWork`.

    Device thread only, except for the methods that say otherwise. The futures that it returns are completed there.

    Args:
        read: reads a version's weights from its files, on `reader`.
        copies: how many versions to keep in memory beside the slots. More are kept only if dropping one would lose
            weights that are needed.
        wake: called on the reader's thread when a read has ended.

    Attributes:
        failures: versions that requests wait for and that cannot be staged.
        staged_total, evicted_total: how many versions have been staged and evicted.
        stage_seconds: time from the first to the last unit of the version that was staged last.
        bytes_held: the size of the bank. Any thread may read it.
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
        self.failures: dict[AdapterRef, Exception] = {}
        self.staged_total = self.evicted_total = self.bytes_held = 0
        self.stage_seconds = 0.0
        self._read = read
        self._reader = reader
        self._most_copies = copies
        self._wake = wake
        self._residents: dict[AdapterRef, Resident] = {}
        self._waiting: dict[AdapterRef, Resident] = {}  # those of them that wait for a slot
        self._slots: dict[int, Resident] = {}  # those of them that are in one
        self._reserved: set[int] = set()  # slots whose content is being written or copied out
        self._requests: Counter[AdapterRef] = Counter()
        self._asked: deque[Job] = deque()  # jobs that a caller has asked for
        self._job: Job | None = None
        self._gone = 0  # versions that the registry had dropped when their copies were last looked for
        self._make_room = False  # the last version was urgent: grow the bank before the next one comes

    # -- requests and sequences ------------------------------------------------------------------

    def add_request(self, ref: AdapterRef) -> None:
        """Counts a request for this version. A wait for a slot ends when no request and no future needs it."""
        self._requests[ref] += 1

    def remove_request(self, ref: AdapterRef) -> None:
        self._requests[ref] -= 1
        if not self._requests[ref]:
            del self._requests[ref]
            self._gone = -1

    def ready(self, ref: AdapterRef) -> bool:
        """Whether a sequence with this version may be admitted now. A version in no slot is queued for staging."""
        if ref == BASE_ADAPTER:
            return True
        if (resident := self._in_slot(ref)) is not None:
            admits = not (resident.draining and self._waiting)
            resident.refused = 0.0 if admits else resident.refused or time.monotonic()
            return admits
        if ref not in self.failures:
            if (version := self.registry.version(ref)) is not None:
                self._wait(version)
            else:
                self.failures[ref] = AdapterUnavailableError(f"{ref} was forgotten before the request was served")
        return False

    def pin(self, ref: AdapterRef) -> int:
        """Returns the slot of a version that is `ready`, and keeps the version there until `unpin`. Ends draining."""
        resident = self._in_slot(ref)
        if resident is None or resident.slot is None:
            assert ref == BASE_ADAPTER
            return 0
        resident.pins += 1
        resident.draining = False
        resident.joined = resident.used = time.monotonic()
        return resident.slot

    def unpin(self, ref: AdapterRef) -> None:
        if resident := self._in_slot(ref):
            resident.pins -= 1
            resident.used = time.monotonic()

    def take_failures(self) -> dict[AdapterRef, Exception]:
        """Returns and clears `failures`."""
        failed, self.failures = self.failures, {}
        return failed

    # -- publishing ------------------------------------------------------------------------------

    def stage(
        self, version: Version, weights: AdapterWeights | None = None, *, urgent: bool = False, goes_live: bool = False
    ) -> Future[AdapterRef]:
        """Brings a version into a slot, between decode steps. The future completes when it is there, or fails.

        If every slot is pinned, the future completes anyway. The version is kept as a copy and staged when a sequence
        needs it, so that publishing never waits for other adapters' sequences.

        Args:
            weights: NumPy or MLX arrays; None if its files are to be read.
            urgent: stage it before any other version.
            goes_live: make it live just before the future completes.
        """
        if version.ref == BASE_ADAPTER or self._in_slot(version.ref):
            if goes_live:
                self.registry.flip(version.ref)
            return completed(version.ref)
        resident = self._wait(version)
        resident.weights = resident.weights or weights
        resident.urgent |= urgent
        resident.goes_live |= goes_live
        resident.futures.append(Future())
        return resident.futures[-1]

    def extract(self, version: Version) -> Future[AdapterWeights | None]:
        """A version's weights as float32 NumPy arrays, with the ranks and scales it was published with; None if they
        are neither in a slot nor in memory. Runs between decode steps."""
        return self._ask(self._extract(version.ref))

    def evict_idle(self) -> Future[None]:
        """Evicts every version without pins, and frees the bank if no version is left. A sequence may be admitted
        between two units; then its version stays in its slot, and the bank is not freed. Runs between decode steps.
        Evicted versions are staged again on demand."""
        return self._ask(self._evict_idle())

    def _ask(self, job: Generator[None, None, T]) -> Future[T]:
        """Queues a job. The future gets its return value, or its error, or that it was closed before it ended."""
        done: Future[T] = Future()

        def completing() -> Job:
            try:
                yield
                done.set_result((yield from job))
            except GeneratorExit:
                done.set_exception(AdapterUnavailableError("the device failed, or the base model was unloaded"))
                raise
            except Exception as error:  # the caller gets it here; the device loop recovers from the fault
                done.set_exception(error)
                raise

        asked = completing()
        next(asked)  # so that it can be closed before its first unit too
        self._asked.append(asked)
        return done

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        """See `core.DeviceWork.waits`. It looks at the versions that wait, and not at others."""
        for ref, resident in [*self._waiting.items()]:
            if not resident.futures and not self._requests[ref]:
                self._end_wait(resident)
            elif resident.reading is not None and resident.reading.done():
                self._take_read(resident, resident.reading)
        if self._gone != self.registry.gone_total:
            self._gone = self.registry.gone_total
            self._drop_unneeded()
        if self._job is None:
            self._job = self._next_job()
        return self._job is not None

    @property
    def urgent(self) -> bool:
        """Whether an urgent version waits for its slot."""
        return any(resident.urgent for resident in self._waiting.values())

    def advance(self) -> None:
        """Runs one unit: one group of linears of one slot."""
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None

    def reset(self) -> None:
        """Empties all slots, none of which is pinned, and frees the bank. Versions with copies or files are staged
        again on demand."""
        assert not self.pinned
        if self._job is not None:
            self._job.close()
        self._job = None
        for slot in [*self._slots]:
            self._leave(slot)
        self._reserved.clear()
        self.bank.clear()
        self.bytes_held = 0

    def unload(self) -> None:
        """Frees the bank and all copies for good, when the base model is unloaded. Loads under way fail, and so does
        what was asked."""
        for ref, resident in [*self._waiting.items()]:
            self._fail(resident, AdapterUnavailableError(f"the base model of {ref} was unloaded"))
        self.reset()
        for job in self._asked:
            job.close()
        self._asked.clear()
        self._residents.clear()

    def _next_job(self) -> Job | None:
        """A job that a caller has asked for; else, if there is a slot, the staging of the first version that waits and
        whose weights are in memory; else the growth of the bank. Also starts reading the files of the first ones."""
        if self._asked:
            return self._asked.popleft()
        waiting = sorted(self._waiting.values(), key=lambda resident: (not resident.urgent, resident.since))
        for resident in waiting[:READ_AHEAD]:
            if resident.weights is None and resident.reading is None:
                self._start_read(resident)
        loaded = [resident for resident in waiting if resident.weights is not None]
        if loaded and self._find_slot() is not None:
            return self._stage(loaded[0])
        for resident in loaded:
            self._finish(resident)
            if time.monotonic() - resident.since > _PATIENCE_S:
                self._drain_one(resident.since, sum(other.since <= resident.since for other in waiting))
        make_room, self._make_room = self._make_room, False
        return self._grow() if make_room else None

    # -- slots -----------------------------------------------------------------------------------

    def _find_slot(self) -> int | None:
        """A free slot. If there is none, the slot of a version without pins: of a forgotten one if there is one, else
        of the one that was used least recently.

        Returns None if there is neither, because all slots are pinned or reserved.
        """
        free = (
            slot for slot in range(1, self.bank.slots + 1) if slot not in self._slots and slot not in self._reserved
        )
        if (slot := next(free, None)) is not None:
            return slot
        idle = [resident for resident in self._slots.values() if not resident.pins]
        least = min(idle, key=lambda resident: (not resident.version.forgotten, resident.used), default=None)
        return None if least is None else least.slot

    def _drain_one(self, since: float, wanted: int) -> None:
        """Makes a version that sequences have joined since then admit no more, if fewer than `wanted` of the others
        will leave their slots when their sequences end. It is the one that has been in its slot longest."""
        staying = [each for each in self._slots.values() if not each.draining and each.joined > since]
        if staying and len(self._slots) - len(staying) < wanted:
            min(staying, key=lambda resident: resident.since).draining = True

    def _stage(self, resident: Resident) -> Job:
        """Moves a version that waits into a slot, after evicting the version in it. Looks for the slot when it begins,
        because sequences may have been admitted since the job was chosen."""
        slot, weights, ref = self._find_slot(), resident.weights, resident.version.ref
        if slot is None or weights is None or ref not in self._waiting:
            return
        try:
            self.bank.check_room(slot, weights)
        except AdapterTooLargeError as error:
            self._fail(resident, error)
            return
        started = time.monotonic()
        try:
            yield from self._evict(slot)
            for number, other in [*self._slots.items()]:  # the files of some may have been overwritten meanwhile
                if not other.version.readable and self.registry.needed(other.version):
                    yield from self._copy(number, other)
            yield from self.bank.write(slot, weights)
        except Exception as error:  # the futures get the error; the device loop recovers
            resident.complete(error)
            resident.faults += 1
            if resident.faults > 1:  # its requests have waited for a second attempt; a third would disturb the others
                self._fail(resident, error)
            raise
        self._enter(slot, self._residents.setdefault(ref, resident), weights)  # it may have been dropped meanwhile
        self.stage_seconds = time.monotonic() - started

    def _enter(self, slot: int, resident: Resident, weights: AdapterWeights) -> None:
        """The weights were written into the slot, and the version waits no more."""
        if not resident.ranks:  # its first weights are those that it was published with
            resident.ranks = {path: pair.rank for path, pair in weights.pairs.items()}
            resident.scales = {path: pair.scale for path, pair in weights.pairs.items()}
            resident.rslora = weights.rslora
        self._reserved.discard(slot)
        self._slots[slot], resident.slot = resident, slot
        resident.weights = None if resident.version.readable else weights
        resident.since = resident.used = time.monotonic()
        self.staged_total += 1
        self.bytes_held = self.bank.nbytes
        self._make_room = resident.urgent
        self._finish(resident)
        self._waiting.pop(resident.version.ref, None)
        resident.urgent, resident.faults = False, 0
        self._limit_copies()

    def _leave(self, slot: int) -> Resident:
        """The slot is for another version, or empty."""
        resident = self._slots.pop(slot)
        resident.slot, resident.pins, resident.draining = None, 0, False
        if not self._requests[resident.version.ref]:
            resident.refused = 0.0
        resident.used = time.monotonic()
        return resident

    def _evict(self, slot: int) -> Job:
        """Reserves a slot, and keeps a copy of the version in it. There is no copy if the version is unreachable, or if
        copies are switched off and its files can be read again."""
        self._reserved.add(slot)
        if slot not in self._slots:
            return
        resident = self._leave(slot)
        self.evicted_total += 1
        if self.unreachable(resident.version) or (self._most_copies == 0 and resident.version.readable):
            resident.weights, self._gone = None, -1
            return
        yield from self._copy(slot, resident)
        self._limit_copies()

    def _copy(self, slot: int, resident: Resident) -> Job:
        """Copies the version in a slot to memory, unless it is there."""
        if resident.weights is None:
            pairs: dict[str, LoRAPair] = {}
            yield from self.bank.read(slot, resident.ranks, pairs)
            resident.weights = AdapterWeights(pairs)

    def _evict_idle(self) -> Generator[None, None, None]:
        for slot, resident in [*self._slots.items()]:
            if not resident.pins and resident.slot == slot:
                yield from self._evict(slot)
                self._reserved.discard(slot)
        if not self._slots:
            self.bank.clear()
            self.bytes_held = 0

    def _grow(self) -> Job:
        """Makes room in the bank before the next version comes, because growing takes longer than writing a slot."""
        if (slot := self._find_slot()) is not None:
            yield from self.bank.make_room(slot)
            self.bytes_held = self.bank.nbytes

    def _extract(self, ref: AdapterRef) -> Generator[None, None, AdapterWeights | None]:
        resident = self._residents.get(ref)
        if resident is None:
            return None
        pairs: dict[str, LoRAPair] = {}
        rslora = resident.rslora
        if resident.weights is not None:
            pairs, rslora = dict(resident.weights.pairs), rslora or resident.weights.rslora
        elif resident.slot is not None:
            yield from self.bank.read(resident.slot, resident.ranks, pairs)
        taken = {path: exported(pair, resident.scales.get(path, pair.scale)) for path, pair in pairs.items()}
        return AdapterWeights(taken, rslora) if pairs else None

    # -- waiting, and copies ---------------------------------------------------------------------

    def _wait(self, version: Version) -> Resident:
        """The record of a version that is in no slot, which waits for one from now on."""
        resident = self._residents.get(version.ref)
        if version.ref not in self._waiting:
            if resident is None or resident.version is not version:
                resident = self._residents[version.ref] = Resident(version)
            self._waiting[version.ref] = resident
            resident.since, resident.refused = resident.refused or time.monotonic(), 0.0
        return self._waiting[version.ref]

    def _start_read(self, resident: Resident) -> None:
        """Starts reading a version's files. Fails the wait if no file holds its weights any more."""
        version = resident.version
        if version.readable:
            resident.reading = self._reader.submit(self._read, version)
            resident.reading.add_done_callback(lambda _: self._wake())
        else:
            why = "it was unloaded" if version.forgotten else "no file holds them"
            self._fail(resident, AdapterUnavailableError(f"the weights of {version.ref} are lost: {why}"))

    def _take_read(self, resident: Resident, read: Future[AdapterWeights]) -> None:
        resident.reading = None
        if error := read.exception():
            self._fail(resident, AdapterUnavailableError(f"{resident.version.ref} cannot be read again: {error}"))
        else:
            resident.weights = read.result()

    def _finish(self, resident: Resident) -> None:
        """Makes the version live if it is to be, and completes the futures."""
        error = None
        try:
            if resident.goes_live:
                self.registry.flip(resident.version.ref)
        except UnknownModelError as unloaded:
            error = unloaded
        resident.complete(error)

    def _fail(self, resident: Resident, error: Exception) -> None:
        if self._requests[resident.version.ref]:
            self.failures[resident.version.ref] = error
        resident.complete(error)
        self._end_wait(resident)

    def _end_wait(self, resident: Resident) -> None:
        """The version waits no more. Its weights stay as a copy if something may still ask for it."""
        self._waiting.pop(resident.version.ref, None)
        if resident.reading is not None:
            resident.reading.cancel()
        resident.urgent, resident.reading, resident.faults = False, None, 0
        resident.used, self._gone = time.monotonic(), -1
        self._limit_copies()

    def _copies(self) -> list[Resident]:
        """Versions whose weights are in memory only in case that they are needed again, least recently used first. Any
        thread may ask, as may it for all below."""
        kept = (each for ref, each in self._residents.copy().items() if each.weights and ref not in self._waiting)
        return sorted(kept, key=lambda resident: resident.used)

    def _limit_copies(self) -> None:
        """Drops the least recently used copies, if there are too many, except for the newest one."""
        copies = self._copies()
        surplus = len(copies) - self._most_copies
        for resident in copies[:-1]:
            if surplus > 0 and (resident.version.readable or not self.registry.needed(resident.version)):
                resident.weights, self._gone = None, -1
                surplus -= 1

    def _drop_unneeded(self) -> None:
        """Drops the copies of versions in slots, and all that is kept of others, that nothing can ask for any more or
        whose files hold them. Evicted versions keep their copies though files hold them."""
        for ref, resident in [*self._residents.items()]:
            unreachable = self.unreachable(resident.version)
            if resident.slot is not None:
                if unreachable or resident.version.readable:
                    resident.weights = None
            elif ref not in self._waiting and not self._requests[ref] and (resident.weights is None or unreachable):
                del self._residents[ref]

    # -- state -----------------------------------------------------------------------------------

    def _in_slot(self, ref: AdapterRef) -> Resident | None:
        resident = self._residents.get(ref)
        return None if resident is None or resident.slot is None else resident

    @property
    def slots_used(self) -> int:
        """Slots that versions are in."""
        return len(self._slots)

    @property
    def pinned(self) -> int:
        """Slots that running sequences use."""
        return sum(resident.pins > 0 for resident in self._slots.copy().values())

    @property
    def copies(self) -> int:
        """Versions whose weights are in memory, and that wait for no slot."""
        return len(self._copies())

    def version(self, ref: AdapterRef) -> Version | None:
        """The version that sequences of `ref` are computed with: the one in the slot that they pin or would get, even
        if it was forgotten since. None if it is in no slot and nothing can ask for it any more."""
        resident = self._in_slot(ref)
        return resident.version if resident else self.registry.version(ref)

    def unreachable(self, version: Version) -> bool:
        """Whether nothing can ask for the version any more."""
        return version.forgotten and not version.leases and not self._requests[version.ref]

    def residence(self, version: Version) -> Residence:
        """Where a version's weights are."""
        resident = self._residents.get(version.ref)
        if resident is not None and resident.slot is not None:
            return Residence.SLOT
        return Residence.COPY if resident is not None and resident.weights is not None else Residence.FILE

    def requests(self, ref: AdapterRef) -> int:
        """How many requests for a version the engine has, rollouts and evaluations among them."""
        return self._requests[ref]

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters that have running sequences, and adapters that only have waiting requests."""
        running = {resident.version.ref.name for resident in self._slots.copy().values() if resident.pins}
        requested = {ref.name for ref in self._requests.copy() if ref != BASE_ADAPTER}
        return tuple(sorted(running)), tuple(sorted(requested - running))

    def check_integrity(self) -> None:
        """Raises AssertionError if two versions have one slot, a slot is lost, or pins and requests do not agree."""
        assert self._slots.keys() | self._reserved <= set(range(1, self.bank.slots + 1))
        assert not self._reserved & self._slots.keys()
        assert self._job is not None or not self._reserved
        assert all(self._slots[slot].slot == slot for slot in self._slots)
        for ref, resident in self._residents.items():
            assert resident.version.ref == ref
            assert resident.slot is None or self._slots[resident.slot] is resident
            assert resident.slot is None or ref not in self._waiting
            assert resident.pins == 0 or (resident.slot is not None and resident.pins > 0 and self._requests[ref] > 0)
        assert all(self._residents[ref] is resident for ref, resident in self._waiting.items())
        assert all(count > 0 for count in self._requests.values())
