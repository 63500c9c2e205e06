"""Which adapter versions are in the bank's slots or wait for one, and the jobs that move weights between slots and
copies in memory.

A job is a generator. Each `next` runs one unit of device work, short enough to run between two decode steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version
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

    def drop(self, version: Version) -> None:
        """Drops the copy of a version, if there is one."""
        self._weights.pop(version, None)

    def clear(self) -> None:
        """Drops all copies."""
        self._weights.clear()


@dataclass(eq=False, slots=True)
class PendingLoad:
    """A version that has waited for a slot since `since` (`time.monotonic`).

    Attributes:
        urgent: it is staged before others that wait.
        goes_live: it becomes the live version of its name as soon as it is staged.
        weights: those it was published with, or those read from its files; None if neither, or if it has a copy.
        reading: the read of its files that is under way.
        futures: completed when the version is staged, or cannot be.
        faults: how often staging it has failed on the device.
    """

    version: Version
    since: float
    urgent: bool = False
    goes_live: bool = False
    weights: AdapterWeights | None = None
    reading: Future[AdapterWeights] | None = None
    futures: list[Future[AdapterRef]] = field(default_factory=list)
    faults: int = 0

    def complete(self, error: Exception | None = None) -> None:
        """Completes the futures, with `error` if there is one. From then on, the load makes no version live."""
        futures, self.futures, self.goes_live = self.futures, [], False
        for future in futures:
            if error is None:
                future.set_result(self.version.ref)
            else:
                future.set_exception(error)


class Slots:
    """Slots 1 to `bank.slots` of the bank. Only the device thread changes them; other threads may read.

    Attributes:
        staged, evicted: how many versions have been staged and evicted.
        stage_seconds: time from the first to the last unit of the version that was staged last.
        nbytes: the bank's size in bytes.

    Args:
        copies: gets the versions that are evicted.
        unreachable: whether nothing can ask for a version any more, so that its weights can be dropped.
    """

    def __init__(self, bank: AdapterBank, copies: Copies, unreachable: Callable[[Version], bool]) -> None:
        self.staged = self.evicted = self.nbytes = 0
        self.stage_seconds = 0.0
        self._bank = bank
        self._copies = copies
        self._unreachable = unreachable
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
        """A free slot. If there is none, the slot of a version without pins: of a forgotten one if there is one, else
        of the one that was used least recently.

        Returns None if there is neither, because all slots are pinned or reserved.
        """
        used = self._reserved | {staged.slot for staged in self._staged.values()}
        if (free := next((slot for slot in range(1, self._bank.slots + 1) if slot not in used), None)) is not None:
            return free
        idle = [staged for staged in self._staged.values() if not staged.pins]
        least = min(idle, key=lambda staged: (not staged.version.forgotten, staged.used), default=None)
        return None if least is None else least.slot

    def drain_one(self, most: int) -> None:
        """Makes the version that has been in its slot longest admit no new rows, if fewer than `most` drain."""
        staying = [staged for staged in self._staged.values() if not staged.draining]
        if staying and len(self._staged) - len(staying) < most:
            min(staying, key=lambda staged: staged.since).draining = True

    @property
    def pinned(self) -> int:
        """Slots that live rows use."""
        return sum(staged.pins > 0 for _, staged in self)

    # -- jobs ------------------------------------------------------------------------------------

    def write(self, slot: int, version: Version, weights: AdapterWeights) -> Iterator[None]:
        """Moves a version into a slot, after evicting the version in it."""
        started = time.monotonic()
        if not version.ranks:  # its first weights are those that it was published with
            version.ranks = {path: pair.rank for path, pair in weights.pairs.items()}
            version.scales = {path: pair.scale for path, pair in weights.pairs.items()}
            version.rslora = weights.rslora
        yield from self._evict(slot)
        yield from self._bank.write(slot, weights)
        now = time.monotonic()
        self._reserved.discard(slot)
        self._staged[version.ref] = StagedVersion(version, slot, since=now, used=now)
        self._copies.drop(version)
        self.staged += 1
        self.stage_seconds = now - started
        self.nbytes = self._bank.nbytes

    def _evict(self, slot: int) -> Iterator[None]:
        """Reserves a slot, and keeps a copy of the version in it. There is no copy if the version is unreachable, or if
        copies are switched off and its files can be read again."""
        self._reserved.add(slot)
        staged = next((staged for staged in self._staged.values() if staged.slot == slot), None)
        if staged is None:
            return
        version = staged.version
        del self._staged[version.ref]
        self.evicted += 1
        if self._unreachable(version) or (self._copies.most == 0 and version.readable):
            return
        pairs: dict[str, LoRAPair] = {}
        yield from self._bank.read(slot, version.ranks, pairs)
        self._copies.put(version, AdapterWeights(pairs))

    def evict_idle(self) -> Generator[None, None, None]:
        """Evicts every version without pins, and frees the bank if no version is left. A row may be admitted between
        two units; then its version stays in its slot, and the bank is not freed."""
        for _, staged in self:
            if not staged.pins:
                yield from self._evict(staged.slot)
                self._reserved.discard(staged.slot)
        if not self._staged:
            self.clear()

    def grow(self) -> Iterator[None]:
        """Makes room in the bank before the next version comes, because growing takes longer than writing a slot."""
        if (slot := self.find()) is not None:
            yield from self._bank.make_room(slot)
            self.nbytes = self._bank.nbytes

    def extract(
        self, version: Version, in_memory: Callable[[Version], AdapterWeights | None]
    ) -> Generator[None, None, AdapterWeights | None]:
        """Returns a version's weights as float32 NumPy arrays, with the ranks and scales it was published with. None if
        they are neither in a slot nor in memory.

        `in_memory`: the weights of a version that is in no slot.
        """
        pairs: dict[str, LoRAPair] = {}
        rslora = version.rslora
        if staged := self._staged.get(version.ref):
            yield from self._bank.read(staged.slot, version.ranks, pairs)
        elif weights := in_memory(version):
            pairs, rslora = dict(weights.pairs), rslora or weights.rslora
        scales = version.scales
        exported = {path: _exported(pair, scales.get(path, pair.scale)) for path, pair in pairs.items()}
        return AdapterWeights(exported, rslora) if pairs else None

    def clear(self) -> None:
        """Empties all slots, none of which may be pinned, and frees the bank."""
        assert not any(staged.pins for staged in self._staged.values())
        self._staged.clear()
        self._reserved.clear()
        self._bank.clear()
        self.nbytes = 0

    def check_integrity(self, moving: bool) -> None:
        """Raises AssertionError if two versions have one slot, or a slot is lost. `moving`: a slot may be reserved."""
        slots = [staged.slot for staged in self._staged.values()]
        assert len(slots) == len(set(slots))
        assert set(slots) | self._reserved <= set(range(1, self._bank.slots + 1))
        assert not self._reserved & set(slots)
        assert moving or not self._reserved
        assert all(staged.version.ref == ref and staged.pins >= 0 for ref, staged in self._staged.items())
        assert not any(staged.version in self._copies for staged in self._staged.values())


def _exported(pair: LoRAPair, scale: float) -> LoRAPair:
    """A pair of MLX or NumPy arrays as float32 NumPy, rescaled to `scale`. With a scale of 0, whose b in a slot is all
    zeros, it keeps the scale that it has."""
    a, b = (np.array(mx.array(factor).astype(mx.float32)) for factor in (pair.a, pair.b))
    if scale in (pair.scale, 0):
        return LoRAPair(a, b, pair.scale)
    return LoRAPair(a, b * np.float32(pair.scale / scale), scale)
