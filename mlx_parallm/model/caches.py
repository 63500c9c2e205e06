"""The caches that an mlx-lm model expects, one after the other, also where a layer has several in a `CacheList`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_parallm.errors import UnsupportedModelError

_KINDS = (KVCache, RotatingKVCache, ChunkedKVCache, ConcatenateKVCache, ArraysCache)


class Caches:
    """`each`: mlx-lm's own caches, empty. They are made anew with every object of this class.

    Raises:
        UnsupportedModelError: one of them is neither keys and values nor arrays.
    """

    def __init__(self, model: nn.Module) -> None:
        self._nested = make_prompt_cache(model)
        self.each: list[Any] = [cache for top in self._nested for cache in _inside(top)]
        others = {type(each).__name__ for each in self.each if type(each) not in _KINDS or getattr(each, "keep", False)}
        if others:
            raise UnsupportedModelError(
                f"its layers keep state in {', '.join(sorted(others))}; only keys, values and arrays can be batched"
            )

    def nested(self, caches: Iterable[Any]) -> list[Any]:
        """What the model gets, with these caches in place of mlx-lm's."""
        rest = iter(caches)
        return [_with(top, rest) for top in self._nested]


def _inside(cache: Any) -> tuple[Any, ...]:
    return tuple(cache.caches) if type(cache) is CacheList else (cache,)


def _with(cache: Any, rest: Iterator[Any]) -> Any:
    return CacheList(*(next(rest) for _ in cache.caches)) if type(cache) is CacheList else next(rest)
