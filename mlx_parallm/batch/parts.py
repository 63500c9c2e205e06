"""The parts of a forward pass, for mixers: their rows' states, and their rows' keys and values.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
parts       [ a, b ] x 1 token                [ c ] x 5 tokens      one call of the mixer for each
states      of the rows before the pass are read from where the rows keep them, and those after it are put there. If a
            row has reserved a checkpoint for the end of its part, the state is put there too.
keys        of the rows before the pass are copied out of the pool, and the new ones put behind them. The new ones get
and values  into the pool when the next pass begins: other parts of this pass still read its arrays, and to write into
            an array that is being read would copy it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.batch.spans import Span, write_targets
from mlx_parallm.kv.arena import lines_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS, blocks_for
from mlx_parallm.kv.cache import KVRow, LoRABatchedKVCache
from mlx_parallm.kv.memory import LayerGroup, StateGroup
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.kv.states import StateArena, StateBatch
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.layer_state import LayerSpec, OpaqueSpec, arrays_of
from mlx_parallm.model.mixers import Part, PassMask


def parts_of(pool: LoRABatchedKVCache, spans: Sequence[Span[KVRow]], plan: CachePlan) -> list[RowsOfPool]:
    """The parts of one forward pass. Call `finish` of each when the pass is built. `spans`: `in_order`."""
    parts = list(_cut(pool, spans, plan))
    if pool.states is not None:
        _read_states(pool.states, parts)
    if plan.in_parts & pool.layout.attention.keys():
        for group in pool.groups:
            group.arena.write_pending()
    return parts


class RowsOfPool(Part):
    """Rows of the pool. `spans`: theirs.

    before: their states before the pass; None if none of them has any tokens. Opaque caches are copied before use,
        because rows may have the same ones after a fork
    after: their states after it, which get their layers when the pass is built
    checkpoints: states of single rows of `after`, by the number of the row
    """

    before: StateBatch | None = None

    def __init__(self, pool: LoRABatchedKVCache, spans: Sequence[Span[KVRow]], start: int, mask_axes: int) -> None:
        starts = [span.start for span in spans]
        offset = starts[0] if len(spans) == 1 else mx.array(starts, mx.int32)
        super().__init__(start, start + sum(span.tokens for span in spans), len(spans), offset)
        self.spans, self._pool, self._mask_axes = spans, pool, mask_axes
        self.after, self.checkpoints = StateBatch(len(spans), []), dict[int, StateBatch]()
        self._caches: dict[int, Any] = {}
        self._groups: dict[int, RowsOfGroup] = {}

    def cache(self, number: int) -> Any:
        """See `Part.cache`."""
        if number not in self._caches:
            keys = isinstance(self._pool.layout.layers[number], LayerSpec)
            self._caches[number] = _RowsCache(self, number) if keys else self._states(number)
        return self._caches[number]

    def mask(self, mask: PassMask) -> mx.array | None:
        """See `Part.mask`. Of a recurrent layer, none is needed, because there is no padding."""
        if not isinstance(self._pool.layout.layers[mask.number], LayerSpec):
            return None
        seen = self.group_of(mask.number)[0].mask(mask.window)
        return seen if seen is None or self.rows == 1 else mx.expand_dims(seen, list(range(1, 1 + self._mask_axes)))

    def group_of(self, number: int) -> tuple[RowsOfGroup, int]:
        """What these rows have in the layer group of a cache, and the number of the cache in it."""
        at, index = self._pool.group_of[number]
        if at not in self._groups:
            tables = [span.row.tables[at] for span in self.spans]
            self._groups[at] = RowsOfGroup(self._pool.groups[at], self.spans, tables)
        return self._groups[at], index

    def _states(self, number: int) -> Any:
        assert self._pool.states is not None
        layer = self._pool.states.layers.index(number)
        spec, before = self._pool.states.arena.specs[layer], self.before.layers[layer] if self.before else []
        if isinstance(spec, OpaqueSpec):
            return deepcopy(before[0] if before else spec.empty)
        states = ArraysCache(len(spec.shapes))
        states.cache = [*before] or states.cache
        return states

    def finish(self) -> None:
        """Keeps the states after the pass, of all layers, and drops the caches, which hold the part too."""
        if self._pool.states is not None:
            self._keep_states(self._pool.states.arena)
        self._caches.clear()

    def _keep_states(self, arena: StateArena) -> None:
        assert self._pool.states is not None
        for number, spec in zip(self._pool.states.layers, arena.specs, strict=True):
            if isinstance(spec, OpaqueSpec):
                self.after.layers.append([self.cache(number)])
                arena.add(arrays_of(self.cache(number)))
                continue
            arrays = zip(self.cache(number).cache, spec.dtypes, strict=True)
            after = [mx.contiguous(array.astype(dtype)) for array, dtype in arrays]
            self.after.layers.append(after)
            arena.add(after)
            for row, checkpoint in self.checkpoints.items():
                checkpoint.layers.append([mx.contiguous(array[row : row + 1]) for array in after])
                arena.add(checkpoint.layers[-1])


class RowsOfGroup:
    """What the rows of a part have in one layer group: the blocks that they see, and where their new tokens go."""

    def __init__(self, group: LayerGroup, spans: Sequence[Span[KVRow]], tables: Sequence[Sequence[int]]) -> None:
        self._group, self._spans = group, spans
        self._firsts = [min(first_visible(span.start, group.window), span.start // BLOCK_TOKENS) for span in spans]
        self._stored = max(span.start - first * BLOCK_TOKENS for span, first in zip(spans, self._firsts, strict=True))
        blocks = blocks_for(self._stored)
        self._blocks = np.array([
            _filled(table[first : blocks_for(span.start)], blocks)
            for span, table, first in zip(spans, tables, self._firsts, strict=True)
        ])  # fmt: skip
        self._targets = write_targets(spans, tables)
        self._masks: dict[int | None, mx.array | None] = {}

    def before(self, index: int) -> tuple[mx.array, mx.array] | None:
        """Copies of the keys and values that the rows have, [rows, kv_heads, S, head_dim]; `mask` hides what is beyond
        a row's end. None: no row has any."""
        if not self._stored:
            return None
        arena = self._group.arena
        return self._copied(arena.keys[index]), self._copied(arena.values[index])

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Lets the next pass write new keys and values [rows, kv_heads, T, head_dim] into the pool."""
        at = lines_of(*self._targets, keys.shape[1])
        self._group.arena.write_later(index, at, _by_token(keys), _by_token(values))

    def mask(self, window: int | None) -> mx.array | None:
        """Boolean [rows, T, S + T], or [T, S + T] of one row: which of the keys, those before the pass and the new
        ones, a query sees. None: one token sees all of its row."""
        if window is None and len(self._spans) == self._spans[0].tokens == 1:
            return None
        if window not in self._masks:
            starts = mx.array([span.start for span in self._spans])[:, None, None]
            queries = starts + mx.arange(self._spans[0].tokens)[None, :, None]
            stored = mx.array(self._firsts)[:, None, None] * BLOCK_TOKENS + mx.arange(self._stored)
            keys = mx.concatenate([mx.where(stored < starts, stored, _NOWHERE), queries.swapaxes(1, 2)], axis=2)
            seen = keys <= queries
            seen = seen if window is None else seen & (keys > queries - window)
            self._masks[window] = seen[0] if len(self._spans) == 1 else seen
        return self._masks[window]

    def _copied(self, array: mx.array) -> mx.array:
        kv_heads, total, _, width = array.shape
        at = mx.array(self._blocks[:, None] + np.arange(kv_heads)[:, None] * total)
        dense = array.reshape(kv_heads * total, BLOCK_TOKENS, width)[at]
        rows, _, blocks = at.shape
        return dense.reshape(rows, kv_heads, blocks * BLOCK_TOKENS, width)[:, :, : self._stored]


_NOWHERE = 1 << 30
"""A position that no query sees."""


class _RowsCache:
    """The keys and values of a part's rows, as mlx-lm's caches give them."""

    start_position = 0
    keys: Any = None
    values: Any = None

    def __init__(self, part: RowsOfPool, number: int) -> None:
        self.offset = part.offset
        self._part, self._number = part, number
        self._spec = part._pool.layout.layers[number]

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        assert isinstance(self._spec, LayerSpec)
        return self._part.mask(PassMask(self._number, window_size or self._spec.window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns all keys and values of the rows, the new ones last."""
        group, index = self._part.group_of(self._number)
        group.write(index, keys, values)
        if (before := group.before(index)) is not None:
            keys, values = (mx.concatenate([old, new], axis=2) for old, new in zip(before, (keys, values), strict=True))
        self.keys, self.values, self.offset = keys, values, self.offset + self._part.spans[0].tokens
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def maybe_trim_front(self) -> None:
        """Does nothing: a mask hides what a chunk does not see."""


def _cut(pool: LoRABatchedKVCache, spans: Sequence[Span[KVRow]], plan: CachePlan) -> Iterator[RowsOfPool]:
    """All single tokens of rows that have tokens already, and then each other span alone: a new row has no state, and
    mlx-lm's code begins with one of its own. With a compatible plan each span is alone."""
    start = 0

    def kind(item: tuple[int, Span[KVRow]]) -> int:
        number, span = item
        if span.tokens > 1 or plan.compatible:
            return number
        return -1 if span.start else -2

    for _, group in groupby(enumerate(spans), key=kind):
        part = RowsOfPool(pool, [span for _, span in group], start, plan.mask_axes)
        yield part
        start = part.stop


def _read_states(group: StateGroup, parts: Sequence[RowsOfPool]) -> None:
    """Lets the parts have their rows' states before the pass, and the rows keep those after it."""
    arena = group.arena
    arena.begin_pass(group.allocator.is_free)
    old = arena.batches(_state_before(group, span) for part in parts for span in part.spans)
    for part in parts:
        part.before = arena.read([_state_before(group, span) for span in part.spans])
        arena.write([group.block_of(span.row) for span in part.spans], part.after)
        for row, span in enumerate(part.spans):
            block, rest = divmod(span.stop, BLOCK_TOKENS)
            if not rest and (state := span.row.checkpoints.get(block)) is not None:
                part.checkpoints[row] = StateBatch(1, [])
                arena.write([state], part.checkpoints[row])
    for batch in old:
        arena.cut_up(batch)


def _state_before(group: StateGroup, span: Span[KVRow]) -> int | None:
    """The id of the row's state before its span; None if it has no tokens yet, so that it has another row's."""
    return group.block_of(span.row) if span.start else None


def _filled(block_ids: Sequence[int], blocks: int) -> list[int]:
    """So many ids: those of a row's blocks, and the last one of them again, or 0 if there is none."""
    return [*block_ids, *[block_ids[-1] if block_ids else 0] * (blocks - len(block_ids))]


def _by_token(tokens: mx.array) -> mx.array:
    """[B, heads, T, head_dim] → [B · T, heads, 1, head_dim]."""
    rows, heads, count, width = tokens.shape
    return tokens.transpose(0, 2, 1, 3).reshape(rows * count, heads, 1, width)
