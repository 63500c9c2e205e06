"""The adapter bank: the low-rank factors of adapter versions, one version per slot.

Each `LinearGroup` has the arrays of linears with the same input, such as q_proj, k_proj and v_proj; the head, whose out
is the vocabulary, is a group of its own. Slot 0 is all zeros and stands for the base model. Smaller ranks are padded
with zeros to max_rank, and an adapter's scale is multiplied into its b. Arrays are made when the first adapter needs
them and grow by doubling, so a server without adapters allocates none, and one whose adapters do not change the head,
or experts, allocates none for these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx

from mlx_parallm.adapters.forward_context import AdapterContext, ForwardContext
from mlx_parallm.adapters.linear_group import LinearGroup
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.config.types import human_bytes
from mlx_parallm.errors import AdapterTooLargeError

GroupMaker = Callable[[Sequence[LinearSpec], int, mx.Dtype], LinearGroup]
"""Makes an empty group of linears: (specs, max_rank, dtype) → the group."""

_FIRST_SLOTS = 4
"""Slots of a new array, slot 0 included."""


class AdapterBank:
    """The LoRA factors of all linears of a model, for several adapter versions. Device thread only.

    Args:
        layout: the linears that adapters may change.
        slots: number of adapter versions that it can hold, not counting slot 0.
        max_rank: the rank to which every slot is padded.
        dtype: dtype of the model's activations.
        limit: most bytes that it may take.
        make_group: makes its groups; see `split` for a model over several machines.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        slots: int,
        max_rank: int,
        dtype: mx.Dtype,
        limit: int = sys.maxsize,
        make_group: GroupMaker = LinearGroup,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.limit = limit
        self.context: AdapterContext | None = None
        by_group: dict[str, list[LinearSpec]] = {}
        for spec in layout:
            by_group.setdefault(spec.group, []).append(spec)
        self.groups = {name: make_group(specs, max_rank, dtype) for name, specs in by_group.items()}

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())

    def forward(self, slots: Sequence[int], lengths: Sequence[int]) -> AbstractContextManager[None]:
        """While the block runs, the model's adapted linears use slot `slots[i]` for the `lengths[i]` tokens of row i.
        If all rows use the base model, adapted linears add nothing."""
        return self.using(ForwardContext(slots, lengths) if any(slots) else None)

    @contextmanager
    def using(self, context: AdapterContext | None) -> Iterator[None]:
        """While the block runs, the model's adapted linears call `context`. If it is None, they add nothing."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    def using_part(self, start: int, stop: int) -> AbstractContextManager[None]:
        """While the block runs, the adapted linears are called for the tokens [start, stop) of the current forward
        pass alone; see `AdapterContext.part`."""
        return self.using(None if self.context is None else self.context.part(start, stop))

    def check_room(self, slot: int, weights: AdapterWeights) -> None:
        """Raises AdapterTooLargeError: with these weights in the slot, the bank would take more than its limit."""
        slots = self._capacity(slot)
        needed = sum(
            group.nbytes_with(slots, [path for path in group.specs if path in weights.pairs])
            for group in self.groups.values()
        )
        if needed > self.limit:
            raise AdapterTooLargeError(
                f"with this adapter, the adapter bank needs {human_bytes(needed)} for {slots - 1} slots of rank "
                f"{self.max_rank}, and may take {human_bytes(self.limit)} of the memory that requests share: lower "
                "--max-lora-rank or --max-loras, raise --kv-cache-memory, or train an adapter of fewer linears, such "
                "as one without experts"
            )

    def write(self, slot: int, weights: AdapterWeights) -> Iterator[None]:
        """Writes one slot. Each `next` grows or writes one group of linears, a short unit of device work."""
        assert 1 <= slot <= self.slots
        slots = self._capacity(slot)
        for group in self.groups.values():
            pairs = {path: weights.pairs[path] for path in group.specs if path in weights.pairs}
            if (pairs or group.places) and group.fit(slots, tuple(pairs)):
                yield
            if pairs or slot in group.written:
                group.write(slot, pairs)
                yield

    def make_room(self, slot: int) -> Iterator[None]:
        """Grows the arrays so that they have this slot, one group at a time."""
        slots = self._capacity(slot)
        for group in self.groups.values():
            if group.places and group.fit(slots, ()):
                yield

    def read(self, slot: int, ranks: dict[str, int], into: dict[str, LoRAPair]) -> Iterator[None]:
        """Copies one slot's pairs into `into`, without padding, one group at a time. `ranks`: the rank of each path."""
        for group in self.groups.values():
            mine = {path: ranks[path] for path in group.specs if path in ranks}
            if mine:
                into.update(group.read(slot, mine))
                yield

    def clear(self) -> None:
        """Frees all slots. Needed after a failed write, because the arrays may hold wrong values."""
        for group in self.groups.values():
            group.clear()

    def _capacity(self, slot: int) -> int:
        """The number of slots, slot 0 included, of arrays that include `slot`: a power of two, or all slots.

        It is the same for all groups, because a forward pass reads every slot of its rows in each group that one of
        their adapters changes.
        """
        held = max((group.slots for group in self.groups.values()), default=0)
        return min(max(_FIRST_SLOTS, held, 1 << slot.bit_length()), self.slots + 1)
