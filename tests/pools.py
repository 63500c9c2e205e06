"""Small KV pools of tagged blocks, and rows that have computed a text."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from pool_walk import FULL, RECURRENT, WINDOWED

from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.layer_state import KVLayout, LayerState

TEXT = [(i * i) % 251 for i in range(2000)]
MODELS = {"full": [FULL, FULL], "mixed": [FULL, WINDOWED, WINDOWED], "windowed": [WINDOWED]}

WITH_STATES = {**MODELS, "recurrent": [RECURRENT, FULL]}


def pool(blocks: int, layers: Sequence[LayerState] = (FULL,), max_length: int = 10_000, **kwargs) -> LoRABatchedKVCache:
    """A pool with a budget of `blocks` blocks; only with tags, of which a block counts one byte for each layer."""
    return LoRABatchedKVCache(
        KVLayout(tuple(layers), mx.float32), DeviceMemory(blocks * len(layers)), max_length, **kwargs
    )


def reserve(cache: LoRABatchedKVCache, nbytes: int) -> None:
    """Others hold so much of the budget."""
    cache.device.open_account(MemoryAccount.ADAPTERS, lambda: nbytes)


def computed(cache: LoRABatchedKVCache, ids: Sequence[int], root: str | None = "v1") -> KVRow:
    """A row that has computed `ids` and registered them."""
    row = cache.open(len(ids), root, ids)
    assert row is not None
    row.computed = len(ids)
    if root is not None:
        cache.freeze(row, root, ids)
    return row


def cached(cache: LoRABatchedKVCache, ids: Sequence[int], root: str = "v1") -> None:
    cache.close(computed(cache, ids, root), root, ids)


def found(cache: LoRABatchedKVCache, ids: Sequence[int], root: str = "v1") -> int:
    row = cache.open(len(ids), root, ids)
    assert row is not None
    length = row.computed
    cache.close(row)
    cache.check_integrity()
    return length
