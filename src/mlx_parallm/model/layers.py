"""What a KV pool must know of each layer, seen in one token's forward rather than guessed from the config's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_parallm.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's keys and values: `[kv_heads, tokens, head_dim_k | head_dim_v]` for each row.

    `window`: the layer attends to that many last tokens, itself included; None: to all.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a forward shows of a model.

    `layers`: one spec for each cache the model expects, in order. `kv_dtype`: of keys and values.
    `vocab_size`: logits of a position, at least as many as the tokenizer has tokens.
    """

    layers: tuple[LayerSpec, ...]
    kv_dtype: mx.Dtype
    vocab_size: int


class ProbeCache:
    """Stands in for an empty cache for one forward of one token, and remembers what the layer gave it."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.asked_window: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keeps and returns this token's own keys and values, each [1, kv_heads, 1, head_dim]."""
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """One token needs no mask."""
        self.asked_window = window_size


def cache_kinds(model: nn.Module) -> list[type]:
    """The cache mlx-lm would give each layer."""
    return [type(cache) for cache in make_prompt_cache(model)]


def probe(model: nn.Module) -> ModelShape:
    """Runs one token and reads the shapes off.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values of plain attention.
    """
    windows = [_window(cache) for cache in make_prompt_cache(model)]
    caches = [ProbeCache() for _ in windows]
    try:
        logits = model(mx.array([[0]]), cache=caches)
    except Exception as error:  # the model file is not ours: any failure means that it wants another kind of cache
        raise UnsupportedModelError(f"{_name(model)} does not run with a plain KV cache: {error}") from error
    layers = tuple(_spec(model, i, cache, windows[i]) for i, cache in enumerate(caches))
    dtypes = {array.dtype for cache in caches for array in (cache.keys, cache.values) if array is not None}
    if len(dtypes) != 1:
        raise UnsupportedModelError(f"{_name(model)} mixes types of keys and values: {sorted(map(str, dtypes))}")
    return ModelShape(layers, dtypes.pop(), vocab_size=logits.shape[-1])


def _window(cache: Any) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    raise UnsupportedModelError(f"a layer keeps its state in {type(cache).__name__}: only attention over a KV cache")


def _spec(model: nn.Module, layer: int, cache: ProbeCache, window: int | None) -> LayerSpec:
    if cache.keys is None or cache.values is None:
        raise UnsupportedModelError(f"{_name(model)}: layer {layer} stores no keys and values of its own")
    if cache.asked_window not in (None, window):
        raise UnsupportedModelError(
            f"{_name(model)}: layer {layer} masks a window of {cache.asked_window} tokens but keeps {window or 'all'}"
        )
    kv_heads, head_dim_k = cache.keys.shape[1], cache.keys.shape[3]
    return LayerSpec(kv_heads, head_dim_k, head_dim_v=cache.values.shape[3], window=window)


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__))
