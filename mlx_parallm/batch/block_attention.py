"""Attention of many sequences over their blocks, without copying keys or values and wherever the blocks lie.

Tokens that attend to the same blocks are a fold: one decoding sequence, a short chunk, or decoding sequences that share
a prompt. Folds of equally many tokens make a rectangle, in which each has as many blocks as the longest one. One
batched product, `gather_mm`, reads the queries of a fold and one of its blocks in place:

    products    queries of the fold x keys of the block                 [folds, blocks, kv_heads, w * group, 64]
    scores      the same, scaled and masked, with the blocks of a       [folds, kv_heads, w * group, blocks * 64]
                query side by side, so that one softmax covers them
    outputs     weights x values of each block, added up                [folds, 1, kv_heads * w * group * head_dim]

A fold with fewer blocks repeats one of its own, which is masked. A block of another sequence would not do, because it
may hold a NaN, and 0 x NaN is NaN.

    sequence 0   [ 4 ][ 6 ][ 1 ]      both share 4 and 6:   fold (0, 1) with blocks 4, 6
    sequence 1   [ 4 ][ 6 ][ 3 ]                            fold (0) with block 1, fold (1) with block 3

The outputs of a token that is in several folds are merged, each weighted by the sum of exponents of its scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.distributions import exp
from mlx_parallm.batch.spans import Indices, SeenBlocks
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.device import on_cpu

_WORTH_A_CALL, _WORTH_A_CALL_ON_CPU = 128, 16
"""A call must save the products of at least so many masked blocks."""

_WORTH_FOLDING = 32
"""A fold of several sequences must save the reading of at least so many blocks, because it takes kernels of its own."""

_TINY = 1e-30
"""In place of a sum of no exponents."""

_NEVER_SEEN = 1 << 24
"""The number of a block that only fills a rectangle: it is after every token."""


def pairs_work(dtype: mx.Dtype) -> bool:
    """Whether `gather_mm` multiplies keys and values of this type on this device."""
    return not on_cpu() or dtype == mx.float32


def folds_work() -> bool:
    """Whether one product may have many queries. With MLX 0.32 on CUDA, `gather_mm` fails above 64."""
    return not mx.cuda.is_available()


def calls(rows: Sequence[SeenBlocks]) -> list[Sequence[SeenBlocks]]:
    """Splits sequences, the shortest first, into calls where masked blocks would cost more than a call does."""
    if len(rows) == 1:
        return [rows]
    counts = np.array([len(row.block_ids) for row in rows])
    below, above = np.maximum.accumulate(counts)[:-1], np.maximum.accumulate(counts[::-1])[::-1][1:]
    left = np.arange(1, len(rows))
    saved = (counts.max() - below) * left + (counts.max() - above) * (len(rows) - left)
    best = int(saved.argmax())
    if saved[best] < (_WORTH_A_CALL_ON_CPU if on_cpu() else _WORTH_A_CALL):
        return [rows]
    return [*calls(rows[: best + 1]), *calls(rows[best + 1 :])]


# ---- folds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fold:
    """Tokens that attend to the same blocks.

    tokens: their indices in the call
    block_ids: the ids of the blocks
    numbers: the number of each block in its sequence
    """

    tokens: Sequence[int]
    block_ids: Sequence[int]
    numbers: Sequence[int]


def folds_of(rows: Sequence[SeenBlocks], sharing: bool = True) -> list[list[Fold]]:
    """The folds of all sequences. The first of them have every token once; others share blocks between decoding
    sequences, if `sharing` is allowed and pays. The folds of one list have equally many tokens, except for the first.
    """
    starts = np.cumsum([0, *(row.tokens for row in rows)]).tolist()
    numbers = [range(row.first // BLOCK_TOKENS, row.first // BLOCK_TOKENS + len(row.block_ids)) for row in rows]
    if sharing and starts[-1] == len(rows) and (shared := _shared_blocks(rows, numbers)):
        return _shared_folds(rows, numbers, shared)
    tokens = [range(start, start + row.tokens) for start, row in zip(starts, rows, strict=False)]
    return [[Fold(*each) for each in zip(tokens, (row.block_ids for row in rows), numbers, strict=True)]]


def _shared_blocks(rows: Sequence[SeenBlocks], numbers: Sequence[range]) -> dict[tuple[int, ...], dict[int, int]]:
    """The ids and numbers of blocks that several decoding sequences share, by the indices of these, where it pays.

    A sequence's last block is not shared, because it is being written.
    """
    if len(set().union(*(row.block_ids for row in rows))) == sum(len(row.block_ids) for row in rows):
        return {}
    readers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (row, counted) in enumerate(zip(rows, numbers, strict=True)):
        for block in zip(row.block_ids[:-1], counted, strict=False):
            readers[block].append(index)
    shared: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for (block_id, number), sharers in readers.items():
        shared[tuple(sharers)][block_id] = number
    return {sharers: blocks for sharers, blocks in shared.items() if (len(sharers) - 1) * len(blocks) >= _WORTH_FOLDING}


def _shared_folds(
    rows: Sequence[SeenBlocks], numbers: Sequence[range], shared: dict[tuple[int, ...], dict[int, int]]
) -> list[list[Fold]]:
    """The folds of single tokens of which some share blocks."""
    own = []
    for index, (row, counted) in enumerate(zip(rows, numbers, strict=True)):
        folded = set[int]().union(*(blocks for sharers, blocks in shared.items() if index in sharers))
        blocks = [each for each in zip(row.block_ids, counted, strict=True) if each[0] not in folded]
        own.append(Fold([index], *zip(*blocks, strict=True)))
    by_width: dict[int, list[Fold]] = defaultdict(list)
    for sharers, blocks_of in shared.items():
        by_width[len(sharers)].append(Fold(sharers, list(blocks_of), list(blocks_of.values())))
    return [own, *by_width.values()]


def _filled(lists: Iterable[Sequence[int]], width: int, fill: int | None = None) -> Indices:
    """Lists as the lines of one array, the shorter ones filled with `fill`, or with their own first element."""
    return np.array([
        [*each, *[each[0] if fill is None else fill] * (width - len(each))] for each in lists
    ])  # fmt: skip


# ---- attention -----------------------------------------------------------------------------------


class BlockAttention:
    """The attention of one call in one layer group, with index arrays that all its layers share.

    Args:
        rows: if their numbers of new tokens differ, the shorter ones are padded, and so are those with fewer blocks.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, rows: Sequence[SeenBlocks], window: int | None) -> None:
        folds = folds_of(rows, folds_work())
        positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
        self._rectangles = [_Rectangle(each, positions, window) for each in folds]
        self._merge = _Merge.of(self._rectangles, len(positions))

    def advance(self) -> None:
        """Moves on to the next token of each sequence, in the same blocks."""
        for rectangle in self._rectangles:
            rectangle.advance()

    def attend(
        self, keys: mx.array, values: mx.array, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """softmax(scale · Q Kᵀ) V over each sequence's blocks.

        Args:
            keys, values: of all blocks of the pool, [kv_heads, total, 64, head_dim].
            queries: [N, heads, 1, head_dim], the tokens of all sequences in order.
            sinks: one logit per head that takes part in the softmax but has no value (gpt-oss), or None.

        Returns:
            [N, heads, 1, head_dim of values], in the queries' dtype.
        """
        if self._merge is None and sinks is None:
            return self._rectangles[0].attend(keys, values, queries, scale, with_sums=False)[0]
        with_sums = sinks is not None or len(self._rectangles) > 1
        parts = [each.attend(keys, values, queries, scale, with_sums) for each in self._rectangles]
        outputs, sums = parts[0] if self._merge is None else self._merge(parts)
        if sinks is not None and sums is not None:
            outputs = outputs * mx.sigmoid(sums - sinks[:, None, None]).astype(outputs.dtype)
        return outputs


Part = tuple[mx.array, mx.array | None]
"""Outputs [n, heads, 1, head_dim], and the logarithms of their sums of exponents, fp32 [n, heads, 1, 1]."""


class _Merge:
    """Puts the parts that rectangles have computed in the order of the tokens, and merges those of the same token.

    Args:
        table: [N, k], the parts of each token among those of all rectangles. Tokens with fewer repeat their first one.
        real: [N, k], whether a part is none of these.
    """

    def __init__(self, table: Indices, real: NDArray[np.bool_]) -> None:
        several = table.shape[1] > 1
        self._table = _uint32(table if several else table[:, 0])
        self._hidden = mx.array(np.where(real, np.float32(0), -np.inf))[:, :, None, None, None] if several else None

    @classmethod
    def of(cls, rectangles: Sequence[_Rectangle], tokens: int) -> _Merge | None:
        """None if there is one rectangle that has every token once, in order."""
        every = np.concatenate([rectangle.tokens.ravel() for rectangle in rectangles])
        if np.array_equal(every, np.arange(tokens)):
            return None
        parts: list[list[int]] = [[] for _ in range(tokens)]
        for part, token in enumerate(every.tolist()):
            parts[token].append(part)
        most = 1 if len(rectangles) == 1 else max(map(len, parts))
        lengths = np.array([len(each) for each in parts])
        return cls(_filled((each[:most] for each in parts), most), np.arange(most) < lengths[:, None])

    def __call__(self, parts: Sequence[Part]) -> Part:
        outputs = mx.concatenate([output for output, _ in parts])[self._table]
        sums = [each for _, each in parts if each is not None]
        if not sums:
            return outputs, None
        sum_of = mx.concatenate(sums)[self._table]
        if self._hidden is None:
            return outputs, sum_of
        sum_of = sum_of + self._hidden
        weights = mx.softmax(sum_of, axis=1)
        return (weights * outputs).sum(1).astype(outputs.dtype), mx.logsumexp(sum_of, axis=1)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The matrices that a rectangle's products multiply, in layers of one shape: uint32 [folds, blocks, kv_heads].

    queries: the first operand of Q Kᵀ, among [folds, kv_heads]
    blocks: the second operand of both products, among [kv_heads, total]
    weights: the first operand of P V: each of its own, in order
    ones: [folds, 1, blocks], the operand that adds up the products of a fold. A product adds in fp32, `sum` does not.
    """

    queries: mx.array
    blocks: mx.array
    weights: mx.array
    ones: mx.array


class _Rectangle:
    """Folds of w tokens, each with as many blocks as the longest one has.

    Attributes:
        tokens: [folds, w], the indices of each fold's tokens; shorter folds repeat their first one.
    """

    def __init__(self, folds: Sequence[Fold], positions: Indices, window: int | None) -> None:
        self.tokens = _filled((fold.tokens for fold in folds), max(len(fold.tokens) for fold in folds))
        most = max(len(fold.block_ids) for fold in folds)
        self._block_ids = _filled((fold.block_ids for fold in folds), most)
        first = _filled((fold.numbers for fold in folds), most, _NEVER_SEEN) * BLOCK_TOKENS
        self._last = (positions[self.tokens][:, :, None] - first[:, None])[..., None].astype(np.int32)
        self._window = window
        self._in_block = mx.arange(BLOCK_TOKENS)
        self._on_cpu = on_cpu()
        self._masks: dict[tuple[mx.Dtype, int], mx.array] = {}
        self._operands: dict[tuple[int, int], _Operands] = {}
        self._queries: dict[int, mx.array] = {}

    def advance(self) -> None:
        """Lets each token be the next one of its sequence."""
        self._last += 1
        self._masks.clear()

    def attend(self, keys: mx.array, values: mx.array, queries: mx.array, scale: float, with_sums: bool) -> Part:
        """See `BlockAttention.attend`; of these tokens, with the sums of exponents if they are wanted."""
        kv_heads, total, _, _ = keys.shape
        _, heads, _, head_dim = queries.shape
        folds, blocks = self._block_ids.shape
        dtype = queries.dtype
        operands = self._operands.get((kv_heads, total)) or self._operands_for(kv_heads, total, dtype)
        kind = mx.float32 if with_sums else dtype, heads // kv_heads
        mask = self._masks.get(kind)
        if mask is None:
            mask = self._mask(*kind)
        if self._on_cpu or dtype == mx.float16:  # where one kernel would not do both, or products could overflow
            queries, scale = queries * scale, 1.0
        if self.tokens.shape[1] > 1:
            queries = self._taken(queries, kv_heads)
        matrices = queries.reshape(folds, kv_heads, -1, head_dim)
        products = mx.gather_mm(matrices, keys.swapaxes(-1, -2), operands.queries, operands.blocks)
        scores = products.transpose(0, 2, 3, 1, 4)
        scores = scores + mask if scale == 1.0 else _scaled(scores, mask, scale)
        weights, sums = _softmax(scores.flatten(3), with_sums, self._on_cpu)
        weights = weights.astype(dtype).reshape(folds, kv_heads, -1, blocks, BLOCK_TOKENS).transpose(0, 3, 1, 2, 4)
        products = mx.gather_mm(weights, values, operands.weights, operands.blocks)
        outputs = operands.ones @ products.flatten(2)
        return self._by_token(outputs, kv_heads, heads), None if sums is None else self._by_token(sums, kv_heads, heads)

    def _taken(self, queries: mx.array, kv_heads: int) -> mx.array:
        """Queries [N, heads, 1, head_dim] → those of each fold's tokens: [folds, kv_heads, w, group * head_dim]."""
        if kv_heads not in self._queries:  # [folds, kv_heads, w]
            self._queries[kv_heads] = _uint32(self.tokens[:, None] * kv_heads + np.arange(kv_heads)[:, None])
        return queries.reshape(-1, queries.shape[1] // kv_heads * queries.shape[3])[self._queries[kv_heads]]

    def _by_token(self, array: mx.array, kv_heads: int, heads: int) -> mx.array:
        """[folds, ..., kv_heads * w * group * width] → [folds * w, heads, 1, width]."""
        folds, width = self.tokens.shape
        if width == 1:
            return array.reshape(folds, heads, 1, -1)
        array = array.reshape(folds, kv_heads, width, heads // kv_heads, -1).swapaxes(1, 2)
        return array.reshape(folds * width, heads, 1, -1)

    def _operands_for(self, kv_heads: int, total: int, dtype: mx.Dtype) -> _Operands:
        folds, blocks = self._block_ids.shape
        heads, each = np.arange(kv_heads), (folds, blocks, kv_heads)
        queries = np.arange(folds)[:, None, None] * kv_heads + heads
        made = self._operands[kv_heads, total] = _Operands(
            _uint32(np.broadcast_to(queries, each)),
            _uint32(self._block_ids[..., None] + heads * total),
            _uint32(np.arange(folds * blocks * kv_heads).reshape(each)),
            mx.ones((folds, 1, blocks), dtype),
        )
        return made

    def _mask(self, dtype: mx.Dtype, group: int) -> mx.array:
        """Added to the scores, [folds, 1, 1 or w * group, blocks, 64]: 0 for the keys that a token sees.

        The others get a finite number, so that a token which sees nothing in a rectangle has no NaN there. On a CPU
        they get -inf, because `power` takes three times as long for a finite number that underflows; there, `_softmax`
        guards against the NaN.
        """
        seen = self._in_block <= mx.array(self._last)
        if self._window is not None:
            seen = seen & (self._in_block > mx.array(self._last - self._window))
        hidden = -mx.inf if self._on_cpu else mx.finfo(dtype).min / 2
        mask = mx.where(seen, mx.array(0, dtype), mx.array(hidden, dtype))[:, None]
        made = self._masks[dtype, group] = mask if mask.shape[2] == 1 else mx.repeat(mask, group, axis=2)
        return made


@partial(mx.compile, shapeless=True)
def _scaled(products: mx.array, mask: mx.array, scale: float) -> mx.array:
    """One kernel on a GPU, which also puts a view in order."""
    return products * scale + mask


def _softmax(scores: mx.array, with_sums: bool, by_steps: bool) -> tuple[mx.array, mx.array | None]:
    """Softmax over the last axis, and if wanted the logarithms of the sums of exponents. `by_steps`: faster on a
    CPU."""
    if not by_steps:
        weights = mx.softmax(scores, axis=-1, precise=True)
        return weights, mx.logsumexp(scores, axis=-1, keepdims=True) if with_sums else None
    peak = scores.max(-1, keepdims=True)
    if with_sums:  # a token may see nothing in a rectangle
        peak = mx.maximum(peak, mx.finfo(peak.dtype).min / 2)
    weights = exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if with_sums:
        total = mx.maximum(total, _TINY)
    return weights / total, peak + mx.log(total) if with_sums else None


def _uint32(indices: Indices) -> mx.array:
    return mx.array(indices.astype(np.uint32))
