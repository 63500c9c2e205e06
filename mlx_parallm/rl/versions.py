"""VersionHistory: the versions of an adapter that training has published, and how old each of them is."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.core.adapters import AdapterRef

_KEPT = 1000
"""The least number of versions that are remembered, the newest ones."""


class VersionHistory:
    """The published versions of one adapter, in order; training continues from the last one. The newest of them are
    remembered: all whose trajectories may be trained on, and at least 1,000.

    `staleness`, `includes_ever` and `announce` may be called on any thread.

    Args:
        max_staleness: the largest staleness that is asked for.
    """

    def __init__(self, start: AdapterRef, max_staleness: int = 0) -> None:
        self._kept = max(_KEPT, max_staleness + 1)
        self._order = ({start: 0}, 0)  # positions, which other threads look up while they grow; and the last one
        self._ever = {start: None}  # a set in order
        self._announced: AdapterRef | None = None
        self._saved: AdapterRef | None = None

    @property
    def latest(self) -> AdapterRef:
        return next(reversed(self._positions))

    @property
    def _positions(self) -> dict[AdapterRef, int]:
        return self._order[0]

    def staleness(self, ref: AdapterRef) -> int | None:
        """How many versions were published after `ref`; None: `ref` is not in the history, or not any more."""
        if ref in (self._announced, self._saved):
            return 0
        positions, last = self._order
        position = positions.get(ref)
        return None if position is None else max(0, last - position)

    def includes_ever(self, ref: AdapterRef) -> bool:
        """Whether `ref` was in the history at any time. A request may use a version that a rollback has removed."""
        return ref in self._ever

    def announce(self, ref: AdapterRef) -> None:
        """Call this before `ref` goes live: requests can use it before `append` is called."""
        self._note(ref)
        self._announced = ref

    def retract(self) -> AdapterRef | None:
        """Forgets the announced version, if there is one that was not appended, and returns it."""
        ref, self._announced = self._announced, None
        return ref

    def add_saved(self, ref: AdapterRef) -> None:
        """Call this when a checkpoint has saved the current policy as a new version, which requests may name. That
        version is in the history until the next one is appended."""
        self._note(ref)
        self._saved = ref

    def append(self, ref: AdapterRef) -> None:
        self._note(ref)
        positions, last = self._order
        positions[ref] = last + 1
        self._order = (positions, last + 1)
        self._announced = self._saved = None
        if len(positions) > self._kept:
            del positions[next(iter(positions))]

    def _note(self, ref: AdapterRef) -> None:
        self._ever[ref] = None
        if len(self._ever) > self._kept:
            del self._ever[next(iter(self._ever))]

    def continue_from(self, earlier: Sequence[AdapterRef]) -> None:
        """Call this after a restart: these versions, oldest first, came before the only one in the history."""
        order = [*(ref for ref in earlier if ref != self.latest), self.latest]
        for ref in order:
            self._note(ref)
        self._order = ({ref: position for position, ref in enumerate(order)}, len(order) - 1)

    def rewind_to(self, ref: AdapterRef) -> None:
        """Removes the versions after `ref`. If `ref` is not in the history, a new history starts with it."""
        position = self._positions.get(ref, 0)
        older = {version: at for version, at in self._positions.items() if at < position}
        self._note(ref)
        self._order = ({**older, ref: position}, position)
        self._announced = self._saved = None

    def last(self, count: int) -> tuple[str, ...]:
        """The last `count` versions as text, oldest first."""
        return tuple(map(str, list(self._positions)[-count:]))
