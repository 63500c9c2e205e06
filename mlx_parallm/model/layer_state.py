"""What the layers of a model keep for each sequence: keys and values of all its tokens, arrays of a fixed size, or a
cache that only the model's own code understands. `Caches` are mlx-lm's own, empty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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

from mlx_parallm.errors import UnsupportedModelError

_GROUP_SIZES = (64, 32)
"""Numbers that share a scale and a bias in a quantized block. The larger one is used where it divides a head's size."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one attention layer's keys and values in each sequence: `[kv_heads, tokens, head_dim_k | head_dim_v]`.

    `window` is the number of last tokens that the layer attends to, itself included; None means all. `latent`: of
    latent attention (MLA, arXiv 2405.04434), the width of the latent. Keys begin with it, and the rest of them has
    positions; the latent is the values too, so there are no others.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    latent: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The arrays that a recurrent layer keeps for each sequence, whatever its length: their shapes and dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(shape) * dtype.size for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueSpec:
    """A cache of a class that only the model's own code understands. It grows with the sequence, and is never cut back.

    empty: a cache without tokens. Sequences have copies of it
    nbytes: bytes of a sequence's cache beside those that grow with its tokens, at least 1
    bytes_per_token: by how much it grows with each token
    """

    empty: Any
    nbytes: int
    bytes_per_token: int


LayerState = LayerSpec | RecurrentSpec | OpaqueSpec | None
"""What one cache keeps for each sequence; None: the model does not use it."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a whole model keeps for each sequence: one entry for each cache that it expects, in order; the dtype of keys
    and values or, without any, of the hidden states.

    `bits`: of each number in a full block; None: full blocks are not quantized.
    """

    layers: tuple[LayerState, ...]
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def attention(self) -> dict[int, LayerSpec]:
        """The layers that keep keys and values, by their index in `layers`."""
        return {index: spec for index, spec in enumerate(self.layers) if isinstance(spec, LayerSpec)}

    @property
    def recurrent(self) -> dict[int, RecurrentSpec]:
        """The layers that keep a recurrent state, by their index in `layers`."""
        return {index: spec for index, spec in enumerate(self.layers) if isinstance(spec, RecurrentSpec)}

    @property
    def opaque(self) -> dict[int, OpaqueSpec]:
        """The caches that only the model's own code understands, by their index in `layers`: all or none."""
        return {index: spec for index, spec in enumerate(self.layers) if isinstance(spec, OpaqueSpec)}

    @property
    def states(self) -> Mapping[int, RecurrentSpec | OpaqueSpec]:
        """What is known only after the last token of a sequence, by its index in `layers`."""
        return self.recurrent | self.opaque

    @property
    def is_latent(self) -> bool:
        """Whether layers have latent attention."""
        return any(spec.latent for spec in self.attention.values())

    @property
    def rolls_back(self) -> bool:
        """Whether the last tokens of a sequence can be forgotten at once. A state cannot be brought back."""
        return not self.states

    @property
    def takes_drafts(self) -> bool:
        """Whether tokens of a sequence can be computed that may be wrong. A state can go back to one that was kept."""
        return not self.opaque

    @property
    def stored(self) -> KVLayout:
        """The layout of the arrays that keep full blocks. Quantized, a head's keys or values of one token are 32-bit
        words: the numbers, and then a scale and a bias of 16 bits for each group of them."""
        if self.bits is None:
            return self
        layers = (
            replace(spec, head_dim_k=self._words(spec.head_dim_k), head_dim_v=self._words(spec.head_dim_v))
            if isinstance(spec, LayerSpec)
            else spec
            for spec in self.layers
        )
        return KVLayout(tuple(layers), mx.uint32)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in full blocks, over all layers, and by which opaque caches grow."""
        stored = self.stored
        widths = sum(s.kv_heads * (s.head_dim_k + s.head_dim_v) for s in stored.attention.values())
        return widths * stored.dtype.size + sum(spec.bytes_per_token for spec in self.opaque.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, over all layers, beside those that grow with its tokens."""
        return sum(spec.nbytes for spec in self.states.values())

    def quantized(self, bits: int) -> KVLayout:
        """This layout with full blocks of 8 or 4 bits for each number.

        Raises:
            UnsupportedModelError: there are none, or a head's size is not a multiple of the smallest group.
        """
        if not self.attention:
            raise UnsupportedModelError(
                f"--kv-bits {bits} quantizes keys and values, and the layers of this model keep a recurrent state or "
                "caches of their own instead; leave --kv-bits out"
            )
        sizes = {size for spec in self.attention.values() for size in (spec.head_dim_k, spec.head_dim_v)}
        if odd := sorted(size for size in sizes if size % min(_GROUP_SIZES)):
            raise UnsupportedModelError(
                f"--kv-bits {bits} quantizes groups of {min(_GROUP_SIZES)} numbers, and this model's attention heads "
                f"have {odd[0]}; leave --kv-bits out"
            )
        return replace(self, bits=bits)

    def _words(self, size: int) -> int:
        """32-bit words that hold a quantized vector of one head."""
        assert self.bits is not None
        return size * self.bits // 32 + size // group_size(size)


def group_size(size: int) -> int:
    """How many numbers of a head's vector of this size share a scale and a bias."""
    return next(group for group in _GROUP_SIZES if size % group == 0)


# -- mlx-lm's caches of a model --------------------------------------------------------------------


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
