"""One forward pass over rows of the KV pool: single tokens of many rows, and chunks of others, together.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
tokens      [N, 1]           to the model, a batch of N single tokens, each at its own position
write       one scatter per layer for all N
attention   one call for all single tokens and one for all short chunks (by pairs of row and block), or a few calls if
            their lengths differ much, and one for each long chunk (dense and causal)

For each layer, a model file calls `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention, which asks the pass: it reads the pool in place. What uses a cache
in another way is a mixer, and gets caches of the rows of one part after the other; see `parts`.

Layers of one group share their index arrays. While the same rows decode, those of the pass before move on by one token;
they are made anew when a row joins, leaves, or needs another block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.attention import AttentionCalls, AttentionChoice
from mlx_parallm.batch.parts import parts_of
from mlx_parallm.batch.quantized import QuantizedGroup
from mlx_parallm.batch.spans import Kind, Span, kind_of, positions_of, seen_blocks, write_targets
from mlx_parallm.kv.arena import Lines, lines_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import KVRow, LayerGroup, LoRABatchedKVCache
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.layer_state import LayerSpec
from mlx_parallm.model.linears import LatentHeads
from mlx_parallm.model.mixers import Part, PassCache, PassMask


class GroupPass:
    """The forward pass in one layer group: index arrays that its layers share."""

    def __init__(
        self,
        group: LayerGroup,
        spans: Sequence[Span[KVRow]],
        tables: Sequence[Sequence[int]],
        attention: AttentionChoice,
    ) -> None:
        self.arena, self._window = group.arena, group.window
        rows = [seen_blocks(span, table, group.window) for span, table in zip(spans, tables, strict=True)]
        self._seen = [(row.first // BLOCK_TOKENS, row.block_ids) for row in rows]
        self._next = [(span.stop, 1) for span in spans if span.tokens == 1]
        self._block_ids, self._offsets = write_targets(spans, tables)
        self._lines: dict[int, Lines] = {}
        self._calls = AttentionCalls(rows, group.window, attention)

    def advance(self, spans: Sequence[Span[KVRow]], tables: Sequence[Sequence[int]]) -> bool:
        """Moves the index arrays on to the next token of each row. False if the spans are not those, or if the rows see
        other blocks; nothing has changed then."""
        if self._next != [(span.start, span.tokens) for span in spans]:
            return False
        firsts = [first_visible(start, self._window) for start, _ in self._next]
        stops = [start // BLOCK_TOKENS + 1 for start, _ in self._next]
        if self._seen != [(first, table[first:stop]) for first, table, stop in zip(firsts, tables, stops, strict=True)]:
            return False
        self._next = [(start + 1, 1) for start, _ in self._next]
        self._offsets += 1
        self._lines = {kv_heads: self._moved(lines) for kv_heads, lines in self._lines.items()}
        self._calls.advance()
        return True

    def _moved(self, lines: Lines) -> Lines:
        heads, block_ids, before = lines
        offsets = np.broadcast_to(self._offsets[:, None, None], before.shape)
        return heads, block_ids, mx.array(offsets.astype(np.uint32))

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Writes the new tokens' keys and values, [N, kv_heads, 1, head_dim], into the pool."""
        kv_heads = keys.shape[1]
        if kv_heads not in self._lines:
            self._lines[kv_heads] = lines_of(self._block_ids, self._offsets, kv_heads)
        self.arena.write(index, self._lines[kv_heads], keys, values)

    def attend(
        self, index: int, queries: mx.array, scale: float, sinks: mx.array | None, heads: LatentHeads | None
    ) -> mx.array:
        """See `LayerCache.attend`."""
        return self._calls.attend(self.arena.keys[index], self.arena.values[index], queries, scale, sinks, heads)


KeptGroups = dict[tuple[int, AttentionChoice], GroupPass]
"""The last pass in each layer group, by its number."""


class Forward:
    """One forward pass over rows of the pool, shared by its layers. Implements `hooks.Attention`: the cache that has
    returned the keys answers, whichever layer asks, so layers may share keys and values.

    `offset`: the position of each token, int32 [N].

    Args:
        spans: `in_order`.
        bank: the adapter bank that the mixers' linears read.
        kept: what the passes before have left, which is used again and renewed.
    """

    def __init__(
        self,
        pool: LoRABatchedKVCache,
        spans: Sequence[Span[KVRow]],
        bank: AdapterBank,
        plan: CachePlan,
        attention: AttentionChoice,
        kept: KeptGroups,
    ) -> None:
        self.offset = mx.array(positions_of(spans).astype(np.int32))
        self.bank = bank
        self.parts = parts_of(pool, spans, plan) if plan.mixers else []
        has_long = any(kind_of(span.tokens) is Kind.LONG for span in spans)
        # A chunk of quantized blocks is cut into blocks.
        self.takes_heads = has_long and pool.layout.bits is None and pool.layout.is_latent
        self.heads: LatentHeads | None = None
        self.owners: dict[int, tuple[mx.array, LayerCache]] = {}
        self._pool, self._spans, self._attention, self._kept = pool, spans, attention, kept
        self._groups: dict[int, GroupPass | QuantizedGroup] = {}

    def caches(self) -> list[LayerCache]:
        """What the model gets in place of its caches, in order."""
        layers = enumerate(self._pool.layout.layers)
        return [LayerCache(self, number, spec.latent if isinstance(spec, LayerSpec) else 0) for number, spec in layers]

    def finish(self) -> None:
        """Keeps the states after the pass, and drops all keys, whose caches hold the pass. Call it when it is built."""
        for part in self.parts:
            part.finish()
        self.owners.clear()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: object,
        scale: float,
        mask: object,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `hooks.Attention.attend`. Keys that the model has changed, such as their type, are those of `cache`.

        Raises:
            TypeError: no cache has returned these keys, or the model made an attention mask of its own.
        """
        _, owner = self.owners.get(id(keys), (keys, cache))
        if not isinstance(owner, LayerCache):
            raise TypeError("the model attends to keys that no cache has returned; it cannot be batched")
        return owner.attend(queries, scale, mask, sinks)

    def group(self, layer: int) -> tuple[GroupPass | QuantizedGroup, int]:
        """The pass in the layer's group, made when it is first used, and the layer's number in the group."""
        number, index = self._pool.group_of[layer]
        if number not in self._groups:
            self._groups[number] = self._group(number)
        return self._groups[number], index

    def _group(self, number: int) -> GroupPass | QuantizedGroup:
        pool, spans, tables = self._pool, self._spans, [span.row.tables[number] for span in self._spans]
        group = pool.groups[number]
        if pool.tails is not None and pool.layout.bits is not None:
            return QuantizedGroup(group, pool.tails, tables, spans, pool.layout.bits, self._attention)
        kept = self._kept.get((number, self._attention))
        if kept is None or kept.arena is not group.arena or not kept.advance(spans, tables):
            kept = self._kept[number, self._attention] = GroupPass(group, spans, tables, self._attention)
        return kept


class LayerCache(PassCache):
    """One cache of a forward pass.

    With latent attention, a layer stores keys [latent, part with positions] and no values. In place of that part,
    mlx-lm's code gets the identity: what it computes as the scores of the part are then the queries of the part,
    scaled, and they arrive as the mask. So attention is one call over whole keys. They are the values too, and the
    output is cut: a view of the latents alone would be copied, with all blocks, before each product on a CPU.

    Args:
        latent: see `LayerSpec`.
    """

    def __init__(self, of_pass: Forward, number: int, latent: int) -> None:
        self.number = number
        self.offset = of_pass.offset
        self._pass = of_pass
        self._latent = latent
        self._returned: tuple[mx.array, mx.array] | None = None

    def parts(self) -> Iterator[Part]:
        """See `PassCache.parts`."""
        for part in self._pass.parts:
            with self._pass.bank.using_part(part.start, part.stop):
                yield part

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> PassMask | None:
        return None if self._latent else PassMask(self.number, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the new keys and values and returns them unchanged, because attention reads the pool."""
        group, index = self._pass.group(self.number)
        if self._latent:
            group.write(index, mx.concatenate([keys, values], -1), keys[..., :0])
            values = mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        else:
            group.write(index, keys, values)
        self._pass.owners[id(keys)] = keys, self  # the keys are kept, so that no others get their id
        self._returned = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` has returned, for a layer that shares it."""
        assert self._returned is not None
        return self._returned

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [N, heads, 1, head_dim] over all written tokens of their rows, the new ones included."""
        heads, self._pass.heads = self._pass.heads, None
        group, index = self._pass.group(self.number)
        if self._latent and isinstance(mask, mx.array):
            outputs = group.attend(index, mx.concatenate([queries * scale, mask], -1), 1.0, sinks, heads)
            return outputs if heads is not None else outputs[..., : self._latent]
        if mask is not None and not isinstance(mask, PassMask):
            raise TypeError("the model makes its own attention mask; it cannot be batched")
        return group.attend(index, queries, scale, sinks, None)
