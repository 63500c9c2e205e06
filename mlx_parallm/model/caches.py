"""The caches that an mlx-lm model expects, one after the other, also where a layer has several in a `CacheList`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

_KINDS = (KVCache, RotatingKVCache, ChunkedKVCache, ConcatenateKVCache, ArraysCache)


class Caches:
    """`each`: mlx-lm's own caches, empty. They are made anew with every object of this class. `opaque`: one of them is
    neither keys and values nor arrays, so only the model's own code can use them."""

    def __init__(self, model: nn.Module) -> None:
        self._nested = make_prompt_cache(model)
        self.each: list[Any] = [cache for top in self._nested for cache in _inside(top)]
        self.opaque = any(type(each) not in _KINDS or getattr(each, "keep", False) for each in self.each)

    def nested(self, caches: Iterable[Any]) -> list[Any]:
        """What the model gets, with these caches in place of mlx-lm's."""
        rest = iter(caches)
        return [_with(top, rest) for top in self._nested]


def arrays_of(cache: Any) -> list[mx.array]:
    """The arrays of a cache of any class, by what mlx-lm itself evaluates."""
    return [each for _, each in tree_flatten(cache.state) if isinstance(each, mx.array)]


def _inside(cache: Any) -> tuple[Any, ...]:
    return tuple(cache.caches) if type(cache) is CacheList else (cache,)


def _with(cache: Any, rest: Iterator[Any]) -> Any:
    return CacheList(*(next(rest) for _ in cache.caches)) if type(cache) is CacheList else next(rest)
