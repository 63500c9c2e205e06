"""The arrays of the KV pool: keys and values in blocks of 64 tokens, with one pair of arrays per layer.

    keys[layer]     [kv_heads, blocks, 64, head_dim_k]
    values[layer]   [kv_heads, blocks, 64, head_dim_v]

The heads come first, so that consecutive blocks are a view of shape [kv_heads, tokens, head_dim]. Every write replaces
an array. MLX updates it in place if nothing else refers to the old one, and copies it whole otherwise. Therefore
callers keep no views of it, and nothing that reads it may be in flight when a write is launched. What one part of a
pass writes while another one reads waits for the next pass, or for whatever reads or moves blocks before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.layer_state import LayerSpec

Bytes = NDArray[np.uint8]
"""The keys or values of one block and layer in host memory, [kv_heads, 64, bytes of a head's vector], or the bytes of
an array of a recurrent state."""

Lines = tuple[mx.array, mx.array, mx.array]
"""Where tokens are written in arrays of blocks: their heads, block ids and offsets, each uint32 [n, kv_heads, 1]. As
three indices, they fit arrays of any size, and no array is reshaped for them."""

_BYTES_OF_IDS = 8 * BLOCK_TOKENS


class Arena:
    """The blocks of layers that have the same sliding window. A block's id is its index in the arrays of each layer.

    A model without attention has one arena without layers. Its blocks hold nothing but count the tokens of rows and of
    cached prefixes, or the bytes of opaque caches.

    Attributes:
        blocks: how many every layer has.
        goal: how many the last `resize` was for. It differs from `blocks` until growing is done.

    Args:
        specs: the shapes of these layers.
        dtype: of keys and values.
        bytes_elsewhere: without layers, by how much the opaque caches of a row grow with each token.
    """

    def __init__(self, specs: Sequence[LayerSpec], dtype: mx.Dtype, bytes_elsewhere: int = 0) -> None:
        self.specs = tuple(specs)
        self.dtype = dtype
        self._bytes_elsewhere = bytes_elsewhere
        self.blocks = self.goal = 0
        self.keys = [_zeros(spec.kv_heads, 0, spec.head_dim_k, dtype) for spec in specs]
        self.values = [_zeros(spec.kv_heads, 0, spec.head_dim_v, dtype) for spec in specs]
        self._pending: list[tuple[int, Lines, mx.array, mx.array]] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; without layers, what opaque caches take, or what its ids take, so that
        there is a most of them."""
        widths = sum(spec.kv_heads * (spec.head_dim_k + spec.head_dim_v) for spec in self.specs)
        return (widths * self.dtype.size + self._bytes_elsewhere) * BLOCK_TOKENS or _BYTES_OF_IDS

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays. Before `resize` is done, some layers have more than `blocks`."""
        return sum(int(array.nbytes) for array in self.arrays()) if self.specs else self.blocks * self.block_bytes

    def resize(self, blocks: int, most_bytes: float = math.inf) -> bool:
        """Grows or shrinks towards this number of blocks. The content of blocks that remain is kept.

        It works layer by layer, so at most one layer's arrays exist twice at any time. `blocks` counts those that
        every layer has: it falls at the beginning, and rises when the last layer has grown. If a layer fails, the
        arrays are valid, and calling it again continues.

        Args:
            most_bytes: stop after this many bytes of new arrays, but not before one layer is done.

        Returns:
            Whether all layers are done.

        Raises:
            Exception: the device's error, such as out of memory.
        """
        self._settle()
        self.blocks, self.goal = min(self.blocks, blocks), blocks
        made = 0
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys.shape[1] == blocks:
                continue
            if made >= most_bytes:
                return False
            resized = _resized(keys, blocks), _resized(values, blocks)
            mx.eval(resized)
            self.keys[layer], self.values[layer] = resized
            made += int(resized[0].nbytes + resized[1].nbytes)
        self.blocks = blocks
        return True

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the blocks at `sources` to `targets`, in every layer, and waits for it. No block may be in both.

        All blocks are read before the first write. Otherwise the write would copy the whole array that is being read.
        """
        if not sources:
            return
        self._settle()
        read, written = mx.array(list(sources)), mx.array(list(targets))
        taken = [array[:, read] for array in self.arrays()]
        mx.eval(taken)
        mx.synchronize()
        self._put(written, taken[: len(self.keys)], taken[len(self.keys) :])

    def read(self, block_id: int) -> list[Bytes]:
        """Copies one block to host memory: for each layer its keys, then its values."""
        self._settle()
        arrays = (array for pair in zip(self.keys, self.values, strict=True) for array in pair)
        return [np.asarray(array.view(mx.uint8))[:, block_id].copy() for array in arrays]

    def write_block(self, block_id: int, arrays: Sequence[Bytes]) -> None:
        """Writes one block, from arrays as `read` returns them, after the forward pass in flight."""
        self._settle()
        mx.synchronize()
        numbers = [mx.array(array).view(self.dtype) for array in arrays]
        self._put(block_id, numbers[::2], numbers[1::2])

    def _put(self, block_ids: int | mx.array, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Writes blocks of every layer. A layer may keep keys alone, and MLX fails to write nothing."""
        for arrays, layers in (self.keys, keys), (self.values, values):
            for layer, blocks in enumerate(layers):
                if blocks.size:
                    arrays[layer][:, block_ids] = blocks
        mx.eval(self.arrays())

    def write(self, layer: int, lines: Lines, keys: mx.array, values: mx.array) -> None:
        """Writes tokens: keys and values [n, kv_heads, 1, head_dim] at `lines`.

        Raises:
            ValueError: their shape is another one. MLX would repeat the tokens, or write beyond the array.
        """
        for arrays, tokens in (self.keys, keys), (self.values, values):
            if not tokens.size:
                continue
            array = arrays[layer]
            if tokens.shape != (*lines[0].shape, array.shape[-1]) or tokens.shape[1] > len(array):
                raise ValueError(f"tokens {tokens.shape} do not fit {lines[0].shape} lines of blocks {array.shape}")
            array[lines] = tokens

    def write_later(self, layer: int, lines: Lines, keys: mx.array, values: mx.array) -> None:
        """Writes tokens as `write` does, but not before `write_pending`."""
        self._pending.append((layer, lines, keys, values))

    def write_pending(self) -> None:
        """Writes what waits, in order. The pass before may be in flight while this is built, and not when it is
        launched."""
        for layer, lines, keys, values in self._pending:
            self.write(layer, lines, keys, values)
        self._pending.clear()

    def _settle(self) -> None:
        """The same at once, after the pass in flight."""
        if self._pending:
            mx.synchronize()
            self.write_pending()
            mx.eval(self.arrays())

    def pending_arrays(self) -> list[mx.array]:
        """The tokens that wait. No logits depend on all of them, so they are evaluated with the pass."""
        return [array for _, _, keys, values in self._pending for array in (keys, values)]

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]


def _zeros(heads: int, blocks: int, width: int, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((heads, blocks, BLOCK_TOKENS, width), dtype)


def _resized(array: mx.array, blocks: int) -> mx.array:
    heads, held, _, width = array.shape
    if blocks <= held:
        return mx.contiguous(array[:, :blocks])
    return mx.concatenate([array, _zeros(heads, blocks - held, width, array.dtype)], axis=1)


def lines_of(block_ids: NDArray[np.int64], offsets: NDArray[np.int64], kv_heads: int) -> Lines:
    """Where n tokens are written: at these offsets in these blocks, in each head."""
    shape = len(block_ids), kv_heads, 1
    each = np.arange(kv_heads)[:, None], block_ids[:, None, None], offsets[:, None, None]
    heads, at, inside = (mx.array(np.broadcast_to(index, shape).astype(np.uint32)) for index in each)
    return heads, at, inside
