"""VersionHistory: the versions of an adapter that training has published, and how old each of them is."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.core import AdapterRef


class VersionHistory:
    """The published versions of one adapter, in order; training continues from the last one.

    `staleness`, `includes_ever` and `announce` may be called on any thread.
    """

    def __init__(self, start: AdapterRef) -> None:
        self._positions = {start: 0}  # replaced and never modified, so that any thread may read it
        self._ever = {start}
        self._announced: AdapterRef | None = None
        self._saved: AdapterRef | None = None

    @property
    def latest(self) -> AdapterRef:
        return next(reversed(self._positions))

    def staleness(self, ref: AdapterRef) -> int | None:
        """How many versions were published after `ref`; None: `ref` is not in the history."""
        if ref in (self._announced, self._saved):
            return 0
        positions = self._positions
        return len(positions) - 1 - positions[ref] if ref in positions else None

    def includes_ever(self, ref: AdapterRef) -> bool:
        """Whether `ref` was in the history at any time. A request may use a version that a rollback has removed."""
        return ref in self._ever

    def announce(self, ref: AdapterRef) -> None:
        """Call this before `ref` goes live: requests can draw from it before `append` is called."""
        self._ever.add(ref)
        self._announced = ref

    def retract(self) -> AdapterRef | None:
        """Forgets the announced version, if there is one that was not appended, and returns it."""
        ref, self._announced = self._announced, None
        return ref

    def add_saved(self, ref: AdapterRef) -> None:
        """Call this when a checkpoint has saved the current policy as a new version, which requests may name. That
        version is in the history until the next one is appended."""
        self._ever.add(ref)
        self._saved = ref

    def append(self, ref: AdapterRef) -> None:
        self._ever.add(ref)
        self._positions = {**self._positions, ref: len(self._positions)}
        self._announced = self._saved = None

    def continue_from(self, earlier: Sequence[AdapterRef]) -> None:
        """Call this after a restart: these versions, oldest first, came before the only one in the history."""
        order = [*(ref for ref in earlier if ref != self.latest), self.latest]
        self._ever.update(order)
        self._positions = {ref: position for position, ref in enumerate(order)}

    def rewind_to(self, ref: AdapterRef) -> None:
        """Removes the versions after `ref`. If `ref` is not in the history, a new history starts with it."""
        position = self._positions.get(ref, 0)
        older = {version: at for version, at in self._positions.items() if at < position}
        self._ever.add(ref)
        self._positions = {**older, ref: position}
        self._announced = self._saved = None

    def last(self, count: int) -> tuple[str, ...]:
        """The last `count` versions as text, oldest first."""
        return tuple(map(str, list(self._positions)[-count:]))
