"""AdapterStore: which versions are in the bank's slots, and how they come and go beside traffic.

    FILE ──read (worker thread)──▶ COPY ──stage (units of device work)──▶ SLOT ──evict──▶ COPY ──▶ FILE

A row pins its version's slot while it lives. A version that sequences wait for gets a free slot, or that of the
least recently used version without pins; where all are pinned, after some patience one version admits no new rows
until its slot is free.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.books import AdapterBooks
from mlx_parallm.adapters.copies import Copies
from mlx_parallm.adapters.moves import Extracted, Moves
from mlx_parallm.adapters.reads import Reads
from mlx_parallm.adapters.slots import Slots
from mlx_parallm.adapters.versions import Version
from mlx_parallm.adapters.wants import Told, Want, Wants
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, Residence
from mlx_parallm.errors import AdapterUnavailableError

_PATIENCE_S = 1.0
"""How long a version waits for a slot before another one has to make way."""


class AdapterStore:
    """Implements `core.DeviceWork`. Device thread only, where nothing else is said.

    Args:
        read, reader, wake: see `Reads`.
        copies: evicted versions kept unpadded in memory.
    """

    def __init__(
        self,
        bank: AdapterBank,
        books: AdapterBooks,
        read: Callable[[Version], AdapterWeights],
        reader: Executor,
        copies: int,
        wake: Callable[[], None],
    ) -> None:
        self.bank = bank
        self.books = books
        self.slots = Slots(bank.slots)
        self.copies = Copies(copies, self._may_drop)
        self.moves = Moves(bank, self.slots, self.copies, self._gone)
        self._reads = Reads(read, reader, wake)
        self._wants = Wants()
        self._asked: deque[Iterator[None]] = deque()
        self._holders: Counter[AdapterRef] = Counter()
        self._failed: dict[AdapterRef, Exception] = {}
        self._job: Iterator[None] | None = None
        self._ahead = False  # the last version was urgent: the next one is to find its slot there

    # -- sequences -------------------------------------------------------------------------------

    def hold(self, ref: AdapterRef) -> None:
        """A request of this version has come; wants of versions that no request holds lapse."""
        self._holders[ref] += 1

    def let_go(self, ref: AdapterRef) -> None:
        self._holders[ref] -= 1
        if not self._holders[ref]:
            del self._holders[ref]

    def ready(self, ref: AdapterRef) -> bool:
        """Whether a row may be admitted now. If not, the version is wanted from here on."""
        if ref == BASE_ADAPTER:
            return True
        tenant = self.slots.get(ref)
        if tenant is None and ref not in self._wants and ref not in self._failed:
            self._want(ref)
        return tenant is not None and not (tenant.yielding and self._wants)

    def pin(self, ref: AdapterRef) -> int:
        """The slot of a version that is ready; it stays there until `unpin`. It yields to nobody any more."""
        tenant = self.slots.get(ref)
        if tenant is None:
            assert ref == BASE_ADAPTER
            return 0
        tenant.pin(1)
        return tenant.slot

    def unpin(self, ref: AdapterRef) -> None:
        if tenant := self.slots.get(ref):
            tenant.pin(-1)

    def take_failures(self) -> dict[AdapterRef, Exception]:
        """Versions that sequences wait for and that cannot be had, and why; each told once."""
        failed, self._failed = self._failed, {}
        return failed

    # -- publishing ------------------------------------------------------------------------------

    def stage(self, version: Version, weights: AdapterWeights | None, staged: Told, urgent: bool = False) -> None:
        """Brings a version into a slot beside traffic, then calls `staged(None)`, or `staged(error)`.

        Where every slot is pinned it is kept as a copy, to be staged when a row wants it, and `staged` is called
        all the same: a publish never waits for other tenants' rows.

        Args:
            weights: numpy's or MLX's; None when its files are to be read.
            urgent: at once, as far as rows may be kept waiting.
        """
        if version.ref == BASE_ADAPTER or self.slots.get(version.ref):
            staged(None)
            return
        if weights is not None:
            self._keep(version, weights)
        self._wants.add(version, urgent).staged.append(staged)

    def extract(self, version: Version, extracted: Extracted) -> None:
        """Copies a version's weights out of memory, float32 numpy, beside traffic. `extracted` gets None when they are
        not there, or what the device raised."""
        self._asked.append(self.moves.extract(version, extracted))

    def vacate(self, told: Told) -> None:
        """Takes every version without pins out of its slot, as if another one had come, and gives the bank back where
        none is left; beside traffic. They are staged again when a row wants them."""
        self._asked.append(self.moves.vacate(told))

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether `advance` has a unit to run; see `core.DeviceWork`."""
        self._take_reads()
        self._drop_lapsed()
        if self._job is None:
            self._job = self._next_job()
        return self._job is not None

    @property
    def urgent(self) -> bool:
        """Whether what waits is to be staged at once."""
        return self._wants.urgent

    def advance(self) -> None:
        """Runs one unit: one group of linears of one slot."""
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None

    @property
    def bytes_held(self) -> int:
        """Of the bank. Any thread may ask."""
        return self.moves.bank_bytes

    def reset(self) -> None:
        """Forgets what is in the slots, none of them pinned; what has files or copies is staged again on demand."""
        self._job = None
        self.moves.clear()

    def _next_job(self) -> Iterator[None] | None:
        """The oldest want whose weights are in memory, if a slot can be had for it. Starts reading the others."""
        if self._asked:
            return self._asked.popleft()
        for want in self._wants.next():
            self._fetch(want)
        for want in [want for want in self._wants.in_order() if want.version in self.copies]:
            if self.slots.find() is not None:
                return self._stage(want)
            want.settle(None)
            if time.monotonic() - want.since > _PATIENCE_S:
                self.slots.make_one_yield(most=self._wants.no_later_than(want))
        return self._make_room() if self._ahead else None

    def _make_room(self) -> Iterator[None] | None:
        """For the next version that is urgent: growing the bank takes longer than writing a slot of it."""
        self._ahead = False
        slot = self.slots.find()
        return None if slot is None or self.bank.has_room(slot) else self.moves.grow(slot)

    def _stage(self, want: Want) -> Iterator[None]:
        """Looks for the slot when it begins: rows may have been admitted to any since the job was found."""
        slot = self.slots.find()
        if slot is None or want.version not in self.copies:
            return
        try:
            yield from self.moves.stage(want.version, slot)
        except Exception as error:  # the caller waits for a result; the loop handles the fault
            want.settle(error)
            want.faults += 1
            if want.faults > 1:  # its requests have waited for a second try; a third would stop the others again
                self._fail(want, error)
            raise
        self._wants.drop(want.version.ref)
        self._ahead = want.urgent
        want.settle(None)

    # -- weights in memory -----------------------------------------------------------------------

    def _want(self, ref: AdapterRef) -> None:
        version = self.books.version(ref)
        if version is None:
            self._failed[ref] = AdapterUnavailableError(f"{ref} was forgotten before the request was served")
        else:
            self._wants.add(version)

    def _fetch(self, want: Want) -> None:
        """Starts reading a version that is not in memory; fails it when its files hold something else by now."""
        version = want.version
        if version in self.copies or version in self._reads:
            return
        if version.readable:
            self._reads.start(version)
        else:
            lost = "was unloaded meanwhile" if version.forgotten else "is lost: its files hold other weights by now"
            self._fail(want, AdapterUnavailableError(f"{version.ref} {lost}"))

    def _take_reads(self) -> None:
        for ref, read in self._reads.take():
            want = self._wants.get(ref)
            if want is None:
                continue
            if isinstance(read, BaseException):
                self._fail(want, AdapterUnavailableError(f"{ref} cannot be read again: {read}"))
            else:
                self._keep(want.version, read)

    def _keep(self, version: Version, weights: AdapterWeights) -> None:
        """Weights as they were published: their ranks and scales are what `_extract` gives back."""
        version.ranks = {path: pair.rank for path, pair in weights.pairs.items()}
        version.scales = {path: pair.scale for path, pair in weights.pairs.items()}
        self.copies.put(version, weights)

    def _gone(self, version: Version) -> bool:
        return version.forgotten and not version.leases and not self._holders[version.ref]

    def _may_drop(self, version: Version) -> bool:
        soon = any(want.version is version for want in self._wants.next())
        return not soon and (version.readable or not self.books.needed(version))

    def _fail(self, want: Want, error: Exception) -> None:
        ref = want.version.ref
        self._wants.drop(ref)
        if self._holders[ref]:
            self._failed[ref] = error
        want.settle(error)

    def _drop_lapsed(self) -> None:
        """Drops wants that nobody waits for any more, and copies that nobody can ask for."""
        self.copies.purge(self._gone)
        self._wants.drop_lapsed(self._holders.__getitem__)

    # -- figures ---------------------------------------------------------------------------------

    def residence(self, version: Version) -> Residence:
        """Any thread may ask."""
        if self.slots.get(version.ref):
            return Residence.SLOT
        return Residence.COPY if version in self.copies else Residence.FILE

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters that have rows, and adapters that requests wait for without having any. Any thread may ask."""
        running = {ref.name for ref, tenant in self.slots if tenant.pins}
        held = {ref.name for ref in self._holders.copy() if ref != BASE_ADAPTER}
        return tuple(sorted(running)), tuple(sorted(held - running))

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, pins and copies do not agree."""
        self.slots.check_integrity(moving=self._job is not None)
        for ref, tenant in self.slots:
            assert tenant.version not in self.copies
            assert not tenant.pins or self._holders[ref] > 0
        assert all(count > 0 for count in self._holders.values())
