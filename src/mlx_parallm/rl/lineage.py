"""Which versions a policy went through, and how far back each of them is."""

from __future__ import annotations

from mlx_parallm.core import AdapterRef


class Lineage:
    """Versions in the order of their publication; the policy is trained on from the last one.

    `lag`, `knew` and `expect` may be called on any thread.
    """

    def __init__(self, start: AdapterRef) -> None:
        self._places = {start: 0}  # replaced, never written to
        self._known = {start}
        self._expected: AdapterRef | None = None

    @property
    def tip(self) -> AdapterRef:
        """The last one."""
        return next(reversed(self._places))

    def lag(self, ref: AdapterRef) -> int | None:
        """Versions published since this one; None: it is not in the lineage, or not any more."""
        if ref == self._expected:
            return 0
        places = self._places
        return len(places) - 1 - places[ref] if ref in places else None

    def knew(self, ref: AdapterRef) -> bool:
        """Whether it was ever in the lineage: a request may have leased it just before a rollback."""
        return ref in self._known

    def expect(self, ref: AdapterRef) -> None:
        """It may be live before it is appended: what it draws by then is the newest version's."""
        self._known.add(ref)
        self._expected = ref

    def append(self, ref: AdapterRef) -> None:
        self._known.add(ref)
        self._places = {**self._places, ref: len(self._places)}
        self._expected = None

    def back_to(self, ref: AdapterRef) -> None:
        """Forgets what came after `ref`; one that is not in the lineage begins it anew."""
        place = self._places.get(ref, 0)
        kept = {older: at for older, at in self._places.items() if at < place}
        self._known.add(ref)
        self._places = {**kept, ref: place}
        self._expected = None

    def newest(self, count: int) -> tuple[str, ...]:
        """The last ones, oldest first, for people to read."""
        return tuple(map(str, list(self._places)[-count:]))
