"""The cache objects of one forward pass, through which mlx-lm's model files use the KV pool.

For each layer, a model file calls `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention, which asks the pass: it reads the pool in place. What uses a cache
in another way is a mixer, and gets caches of the rows of one part after the other; see `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.attention_calls import Kind, kind_of
from mlx_parallm.batch.forward import Forward, Span
from mlx_parallm.batch.parts import PassParts
from mlx_parallm.kv.cache import KVRow, LoRABatchedKVCache
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.layer_state import LayerSpec
from mlx_parallm.model.linears import LatentHeads
from mlx_parallm.model.mixers import Part, PassCache, PassMask


class ServedPass:
    """A forward pass over rows of the pool. Implements `hooks.Attention`: the cache that has returned the keys answers,
    whichever layer asks, so layers may share keys and values.

    Args:
        spans: `in_order`.
        bank: the adapter bank that the mixers' linears read.
        dense_rows: see `Forward`.
    """

    def __init__(
        self,
        pool: LoRABatchedKVCache,
        spans: Sequence[Span[KVRow]],
        bank: AdapterBank,
        plan: CachePlan,
        dense_rows: float,
    ) -> None:
        self.forward = Forward(pool, spans, dense_rows)
        self.parts = PassParts(pool, spans, bank, plan) if plan.mixers else None
        whole = pool.layout.is_latent and pool.layout.bits is None  # a chunk of quantized blocks is cut into blocks
        self.takes_heads = whole and any(kind_of(span.tokens) is Kind.LONG for span in spans)
        self.heads: LatentHeads | None = None
        self._owners: dict[int, tuple[mx.array, LayerCache]] = {}
        self.caches = [
            LayerCache(self, number, spec.latent if isinstance(spec, LayerSpec) else 0)
            for number, spec in enumerate(pool.layout.layers)
        ]

    def own(self, keys: mx.array, owner: LayerCache) -> None:
        """Lets this cache answer for these keys, which are kept so that no others get their id."""
        self._owners[id(keys)] = keys, owner

    def finish(self) -> None:
        """Keeps the states after the pass, and drops all keys. Call it when the pass is built: the caches that it holds
        hold it too."""
        if self.parts is not None:
            self.parts.finish()
        self._owners.clear()
        self.caches.clear()

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
            TypeError: no cache has returned these keys.
        """
        _, owner = self._owners.get(id(keys), (keys, cache))
        if not isinstance(owner, LayerCache):
            raise TypeError("the model attends to keys that no cache has returned; it cannot be batched")
        heads, self.heads = self.heads, None
        return owner.attend(queries, scale, mask, sinks, heads)


class LayerCache(PassCache):
    """One cache of a forward pass.

    With latent attention, a layer stores keys [latent, part with positions] and no values. In place of that part,
    mlx-lm's code gets the identity: what it computes as the scores of the part are then the queries of the part,
    scaled, and they arrive as the mask. So attention is one call over whole keys. They are the values too, and the
    output is cut: a view of the latents alone would be copied, with all blocks, before each product on a CPU.

    Args:
        latent: see `LayerSpec`.
    """

    def __init__(self, of_pass: ServedPass, number: int, latent: int) -> None:
        self.number = number
        self.offset = of_pass.forward.offset
        self._pass = of_pass
        self._latent = latent
        self._returned: tuple[mx.array, mx.array] | None = None

    def parts(self) -> Iterator[Part]:
        """See `PassCache.parts`."""
        assert self._pass.parts is not None
        return iter(self._pass.parts)

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> PassMask | None:
        return None if self._latent else PassMask(self.number, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the new keys and values and returns them unchanged, because attention reads the pool."""
        if self._latent:
            self._pass.forward.write(self.number, mx.concatenate([keys, values], -1), keys[..., :0])
            values = mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        else:
            self._pass.forward.write(self.number, keys, values)
        self._pass.own(keys, self)
        self._returned = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` has returned, for a layer that shares it."""
        assert self._returned is not None
        return self._returned

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None, heads: LatentHeads | None
    ) -> mx.array:
        """Attention of queries [N, heads, 1, head_dim] over all written tokens of their rows, the new ones included.
        `heads`: see `AttentionCalls.attend`.

        Raises:
            TypeError: the model made an attention mask of its own.
        """
        if self._latent and isinstance(mask, mx.array):
            queries = mx.concatenate([queries * scale, mask], -1)
            outputs = self._pass.forward.attend(self.number, queries, 1.0, sinks, heads)
            return outputs if heads is not None else outputs[..., : self._latent]
        if not isinstance(mask, PassMask | None):
            raise TypeError("the model makes its own attention mask; it cannot be batched")
        return self._pass.forward.attend(self.number, queries, scale, sinks)
