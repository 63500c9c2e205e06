"""Where rows come from, as the scheduler sees it."""

from __future__ import annotations

from typing import Protocol

from mlx_parallm.core import AdapterRef
from mlx_parallm.scheduler.sequence import Sequence


class RowMemory(Protocol):
    """The KV pool and the adapter slots, as far as the scheduler needs them: rows of a byte budget."""

    def ready(self, adapter: AdapterRef) -> bool:
        """Whether rows of the adapter may be admitted now; if it is not on the device, it is brought there."""
        ...

    def allocate(self, sequence: Sequence, source: Sequence | None) -> int | None:
        """Gives `sequence` a row for all its tokens, copied from `source`'s prompt when given.

        Returns:
            How many of its tokens are computed in the new row, or None when the budget is spent.
        """
        ...

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Makes the row hold `tokens`; False when the budget is spent."""
        ...

    def free(self, sequence: Sequence) -> None: ...
