"""The bounded queue's gate: how many sequences may be inside at once, from before tokenising to the last byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_parallm.errors import OverloadedError


class SequenceGate:
    """Counts the sequences inside. Event loop only, so that check and count are one atomic act.

    Invariant: 0 <= held <= limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def reserve(self, sequences: int) -> Iterator[None]:
        """Holds `sequences` places while the block runs.

        Raises:
            OverloadedError: they do not all fit now.
        """
        if self.held + sequences > self.limit:
            raise OverloadedError(
                f"The queue is full: {self.held} of {self.limit} sequences are held and this request needs "
                f"{sequences}. Try again shortly."
            )
        self.held += sequences
        try:
            yield
        finally:
            self.held -= sequences
