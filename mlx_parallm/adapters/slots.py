"""Where the weights of adapter versions are: in bank slots, as copies in memory, or being read from files."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from mlx_parallm.adapters.weights import AdapterWeights, Version
from mlx_parallm.core import AdapterRef


@dataclass(eq=False, slots=True)
class StagedVersion:
    """A version that has been in a slot since `since` and was last used at `used` (seconds of `time.monotonic`).

    `pins`: number of live rows that use it. `draining`: it admits no new rows, so that another version can
    have the slot.
    """

    version: Version
    slot: int
    since: float
    used: float
    pins: int = 0
    draining: bool = False

    def pin(self) -> None:
        """Counts a new row. Ends draining, because the row was admitted after all."""
        self.pins += 1
        self.draining = False
        self.used = time.monotonic()

    def unpin(self) -> None:
        self.pins -= 1
        self.used = time.monotonic()


class Slots:
    """Slots 1 to `count` of the bank. Only the device thread changes them; other threads may read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._staged: dict[AdapterRef, StagedVersion] = {}
        self._reserved: set[int] = set()  # slots whose content is being written or copied out

    def __len__(self) -> int:
        return len(self._staged)

    def __iter__(self) -> Iterator[tuple[AdapterRef, StagedVersion]]:
        """Over a copy, because other threads may iterate while the device thread changes it."""
        return iter(self._staged.copy().items())

    def get(self, ref: AdapterRef) -> StagedVersion | None:
        return self._staged.get(ref)

    def find(self) -> int | None:
        """A free slot, else that of the least recently used version without pins, where forgotten versions come first.

        Returns None if there is neither, because all slots are pinned or reserved.
        """
        used = self._reserved | {staged.slot for staged in self._staged.values()}
        if (free := next((slot for slot in range(1, self.count + 1) if slot not in used), None)) is not None:
            return free
        idle = [staged for staged in self._staged.values() if not staged.pins]
        least = min(idle, key=lambda staged: (not staged.version.forgotten, staged.used), default=None)
        return None if least is None else least.slot

    def reserve(self, slot: int) -> Version | None:
        """Reserves a slot until `fill` or `release`. Returns the version that was in it; the bank keeps its weights."""
        self._reserved.add(slot)
        staged = next((staged for staged in self._staged.values() if staged.slot == slot), None)
        if staged is None:
            return None
        del self._staged[staged.version.ref]
        return staged.version

    def fill(self, slot: int, version: Version) -> None:
        """Puts a version into a reserved slot."""
        now = time.monotonic()
        self._reserved.discard(slot)
        self._staged[version.ref] = StagedVersion(version, slot, since=now, used=now)

    def release(self, slot: int) -> None:
        """Makes a reserved slot free."""
        self._reserved.discard(slot)

    def clear(self) -> None:
        """Makes all slots free. None may be pinned."""
        assert not any(staged.pins for staged in self._staged.values())
        self._staged.clear()
        self._reserved.clear()

    def drain_one(self, most: int) -> None:
        """Drains the version that has been in its slot for longest, unless `most` versions drain already."""
        staying = [staged for staged in self._staged.values() if not staged.draining]
        if staying and len(self._staged) - len(staying) < most:
            min(staying, key=lambda staged: staged.since).draining = True

    @property
    def pinned(self) -> int:
        """Slots that live rows use."""
        return sum(staged.pins > 0 for _, staged in self)

    def check_integrity(self, moving: bool) -> None:
        """Raises AssertionError if two versions have one slot, or a slot is lost. `moving`: a slot may be reserved."""
        slots = [staged.slot for staged in self._staged.values()]
        assert len(slots) == len(set(slots))
        assert set(slots) | self._reserved <= set(range(1, self.count + 1))
        assert not self._reserved & set(slots)
        assert moving or not self._reserved
        assert all(staged.version.ref == ref and staged.pins >= 0 for ref, staged in self._staged.items())


class Copies:
    """Unpadded weights, in memory, of versions that are in no slot; the least recently used come first.

    Args:
        most: copies to keep. More are kept only if dropping one would lose weights that are needed.
        may_drop: whether a version's copy may be dropped.
    """

    def __init__(self, most: int, may_drop: Callable[[Version], bool]) -> None:
        self.most = most
        self._may_drop = may_drop
        self._weights: OrderedDict[Version, AdapterWeights] = OrderedDict()

    def __contains__(self, version: Version) -> bool:
        return version in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def nbytes(self) -> int:
        return sum(weights.nbytes for weights in self._weights.values())

    def put(self, version: Version, weights: AdapterWeights) -> None:
        """Keeps a copy, and drops the least recently used others if there are too many."""
        self._weights[version] = weights
        self._weights.move_to_end(version)
        for old in list(self._weights)[:-1]:
            if len(self._weights) <= self.most:
                return
            if self._may_drop(old):
                del self._weights[old]

    def purge(self, unreachable: Callable[[Version], bool]) -> None:
        """Drops the copies of versions that nothing can ask for any more."""
        for version in [version for version in self._weights if unreachable(version)]:
            del self._weights[version]

    def get(self, version: Version) -> AdapterWeights | None:
        return self._weights.get(version)

    def take(self, version: Version) -> AdapterWeights:
        return self._weights.pop(version)


class BackgroundReads:
    """Versions whose files are being read on worker threads. Used by the device thread.

    Args:
        read: reads a version's weights from its files, on `reader`.
        wake: called on the worker thread when a read has ended.
    """

    def __init__(self, read: Callable[[Version], AdapterWeights], reader: Executor, wake: Callable[[], None]) -> None:
        self._read = read
        self._reader = reader
        self._wake = wake
        self._futures: dict[AdapterRef, Future[AdapterWeights]] = {}

    def __contains__(self, version: Version) -> bool:
        return version.ref in self._futures

    def start(self, version: Version) -> None:
        future = self._reader.submit(self._read, version)
        self._futures[version.ref] = future
        future.add_done_callback(lambda _: self._wake())

    def take(self) -> list[tuple[AdapterRef, AdapterWeights | BaseException]]:
        """The reads that have ended since the last call, each with the weights or the error."""
        ended = [(ref, future) for ref, future in self._futures.items() if future.done()]
        for ref, _ in ended:
            del self._futures[ref]
        return [(ref, future.exception() or future.result()) for ref, future in ended]
