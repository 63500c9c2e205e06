"""Attention of single tokens and drafts of many sequences in one kernel, which reads their blocks where they lie.

`kernels/attend.kernel` is the kernel's text, one for Metal and CUDA. This module makes the index arrays that it reads:

    tile    queries that share a head of keys and values: the heads of a group, of one token or of a few of a draft
    part    a tile and some of its blocks. Few or long sequences have several parts for each tile, so that the whole
            GPU is busy; a second kernel merges them then

                         kv head 0     kv head 1
    sequence 0, 8 blocks  [ part 0 ]    [ part 0 ]      a threadgroup each
    sequence 1, 40        [ part 1 ]    [ part 1 ]      blocks  0 to 19
                          [ part 2 ]    [ part 2 ]      blocks 20 to 39

Sequences are not padded, whatever their lengths. Tokens of latent attention stay with `BlockAttention`: all query heads
share one head of keys there, so that it is a product of matrices, and a GPU has units for these. Quantized blocks are
read as the copies in full precision that `quantized` makes of them, because the newest block of a sequence is never
quantized, and lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate, chain, pairwise
from typing import Any

import mlx.core as mx

from mlx_parallm.batch.spans import SeenBlocks
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.layer_state import KVLayout

Kernel = Callable[..., list[mx.array]]
"""What `mx.fast.metal_kernel` returns."""

MOST_TOKENS = 8
"""Of a draft. Products of matrices are faster for more tokens."""
_WIDEST = 512
_NUMBERS = 1024
"""Of all queries of a tile: a thread holds a 32nd of them twice, as query and as output, in registers."""
_SHARED_BYTES = 16 << 10
"""Threadgroup memory for the outputs of simdgroups. A Mac's GPU has 32 KiB for all threadgroups of a core."""
_MOST_SIMDGROUPS = 8
_THREADGROUPS = 128
"""Parts are made until there are so many threadgroups: three for each core of a large GPU of Apple."""
_LEAST_BLOCKS = 8
"""Of a part that is one of several, so that each simdgroup has one."""
_NO_WINDOW = 1 << 30
_LEAST_INDICES = 8

_COMMON = f"""
#define BLOCK {BLOCK_TOKENS}
#define LOWEST -3.0e38f
"""
_METAL = """
#define THREADGROUP threadgroup
#define SIMD_SUM(x) metal::simd_sum(x)
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define EXP(x) metal::fast::exp(x)
#define LOG(x) metal::fast::log(x)
#define MAX(a, b) metal::max(a, b)
#define MIN(a, b) metal::min(a, b)
"""
_METAL_PLACE = """
const int group_x = threadgroup_position_in_grid.x, group_y = threadgroup_position_in_grid.y;
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
"""
_CUDA = """
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
#define THREADGROUP __shared__
#define SIMD_SUM(x) warp_sum(x)
#define BARRIER() __syncthreads()
#define EXP(x) __expf(x)
#define LOG(x) __logf(x)
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
"""
_CUDA_PLACE = """
const int group_x = blockIdx.x, group_y = blockIdx.y;
const int lane = threadIdx.x % 32, simd = threadIdx.x / 32;
"""


PROVED_ON_METAL: str | None = None
"""The version whose report from a Mac showed that the kernel is right and faster there; None: no report has."""


def is_proved() -> bool:
    """Whether the kernel may be chosen on this device without being asked for."""
    return mx.cuda.is_available() or PROVED_ON_METAL is not None


def obstacle(layout: KVLayout) -> str | None:
    """Why this kernel cannot compute the attention of a model on this device; None: it can."""
    if on_cpu():
        return "MLX computes on the CPU"
    if not layout.attention:
        return "the model has no attention"
    if layout.is_latent:
        return "its attention is latent, which is faster as products of matrices"
    widths = {width for spec in layout.attention.values() for width in (spec.head_dim_k, spec.head_dim_v)}
    if bad := [width for width in sorted(widths) if width % 32 or not 0 < width <= _WIDEST]:
        return f"a head of {bad[0]} numbers is no multiple of 32 up to {_WIDEST}"
    return None


def source_of(name: str) -> str:
    """The text of a kernel: the body of a function."""
    return files(__package__).joinpath("kernels", f"{name}.kernel").read_text()


@cache
def kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Kernel:
    """A kernel of `kernels/` for this GPU. MLX compiles it when it is first used."""
    make: Callable[..., Any] = mx.fast.metal_kernel
    header, place = _METAL, _METAL_PLACE
    if mx.cuda.is_available():
        make, header, place = mx.fast.cuda_kernel, _CUDA, _CUDA_PLACE
    made: Kernel = make(
        name=f"mlx_parallm_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=place + source_of(name),
        header=_COMMON + header,
    )
    return made


# ---- what a call is cut into -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of layers: heads of keys and values, query heads for each, and numbers of a key and of a value."""

    kv_heads: int
    group: int
    width_k: int
    width_v: int


@dataclass(slots=True)
class _Plan:
    """The parts of a call, for layers of one shape.

    span: heads of a token that are in one tile.  chunks: tiles that have the heads of a token.  queries: at most in a
    tile.  count: of parts.  blocks, parts, starts, owners: see the kernels.  split: whether a tile has several parts.
    positions: those in `starts`.
    """

    span: int
    chunks: int
    queries: int
    count: int
    blocks: mx.array
    parts: mx.array
    starts: mx.array
    owners: mx.array
    split: bool
    positions: list[int]

    def advance(self, tokens: int) -> None:
        self.positions = [position + tokens for position in self.positions]
        self.starts = _indices(self.positions)


def _plan(rows: Sequence[SeenBlocks], shape: _Shape) -> _Plan:
    most = max(1, _NUMBERS // max(shape.width_k, shape.width_v))
    chunks = -(-shape.group // most)
    span = -(-shape.group // chunks)
    together = max(1, most // shape.group) if any(row.tokens > 1 for row in rows) else 1
    tokens_before = accumulate((row.tokens for row in rows), initial=0)
    blocks_before = accumulate((len(row.block_ids) for row in rows), initial=0)
    tiles = [
        (row, first_token, first_block, at, min(together, row.tokens - at))
        for row, first_token, first_block in zip(rows, tokens_before, blocks_before, strict=False)
        for at in range(0, row.tokens, together)
    ]
    largest = max(_LEAST_BLOCKS, -(-sum(len(row.block_ids) for row, *_ in tiles) * shape.kv_heads // _THREADGROUPS))
    parts: list[tuple[int, ...]] = []
    starts: list[int] = []
    owners: list[tuple[int, int, int]] = []
    split = False
    for row, first_token, first_block, at, tokens in tiles:
        pieces = _cut(len(row.block_ids), largest)
        split |= len(pieces) > 1
        of_chunks = [(len(parts) + chunk * len(pieces), len(pieces)) for chunk in range(chunks)]
        owners += [(*each, token * span) for token in range(tokens) for each in of_chunks]
        for chunk in range(chunks):
            heads = min(span, shape.group - chunk * span)
            for begin, held in pieces:
                number = row.first // BLOCK_TOKENS + begin
                parts.append((first_token + at, chunk * span, heads * tokens, first_block + begin, held, number))
                starts.append(row.start + at)
    ids = [block for row in rows for block in row.block_ids]
    return _Plan(
        span,
        chunks,
        queries=span * together,
        count=len(parts),
        blocks=_indices(ids),
        parts=_indices(chain.from_iterable(parts)),
        starts=_indices(starts),
        owners=_indices(chain.from_iterable(owners)),
        split=split,
        positions=starts,
    )


def _indices(numbers: Iterable[int]) -> mx.array:
    """An array of int32, with at least 8 of them. MLX compiles a kernel once more for arrays with fewer, because it
    puts these into another memory."""
    held = list(numbers)
    return mx.array(held + [0] * (_LEAST_INDICES - len(held)), mx.int32)


def _cut(blocks: int, largest: int) -> list[tuple[int, int]]:
    """Blocks in parts of about the same size, none larger than `largest`: where each begins, and how many it has."""
    pieces = -(-blocks // largest)
    edges = [blocks * piece // pieces for piece in range(pieces + 1)]
    return [(begin, end - begin) for begin, end in pairwise(edges)]


# ---- attention -------------------------------------------------------------------------------------

_INPUTS = ("queries", "keys", "values", "blocks", "parts", "starts", "settings", "scale", "sinks")


class PagedAttention:
    """The attention of one call in one layer group, with index arrays that all its layers share.

    Args:
        rows: single tokens and drafts, in order.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, rows: Sequence[SeenBlocks], window: int | None) -> None:
        self._rows, self._window = rows, window or _NO_WINDOW
        self._advanced = 0
        self._plans: dict[_Shape, _Plan] = {}
        self._arrays: dict[tuple[float, ...], mx.array] = {}
        self._no_sinks = mx.zeros(1)

    def advance(self) -> None:
        """Moves on to the next token of each sequence, in the same blocks."""
        self._advanced += 1
        for plan in self._plans.values():
            plan.advance(1)

    def attend(
        self, keys: mx.array, values: mx.array, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """See `BlockAttention.attend`."""
        kv_heads, total, _, width_k = keys.shape
        tokens, heads, width_v = *queries.shape[:2], values.shape[-1]
        shape = _Shape(kv_heads, heads // kv_heads, width_k, width_v)
        plan = self._plans.get(shape) or self._planned(shape)
        settings = self._numbers((total, self._window), mx.int32)
        factor = self._numbers((scale,), mx.float32)
        simdgroups = max(1, min(_MOST_SIMDGROUPS, _SHARED_BYTES // (4 * plan.queries * width_v)))
        whole = (tokens, heads, 1, width_v)
        pieces = (plan.count, kv_heads, plan.queries, width_v)
        logits = self._no_sinks if sinks is None else sinks
        common: list[tuple[str, Any]] = [
            ("KV", kv_heads),
            ("G", shape.group),
            ("DV", width_v),
            ("M", plan.queries),
            ("SPAN", plan.span),
            ("SINKS", sinks is not None),
            ("S", logits.dtype),  # on CUDA, MLX compiles for each of these values, and not for the types of arrays
        ]
        outputs, sums = kernel("attend", _INPUTS, ("outputs", "sums"))(
            inputs=[queries, keys, values, plan.blocks, plan.parts, plan.starts, settings, factor, logits],
            template=[
                ("T", queries.dtype),
                ("K", keys.dtype),
                ("O", mx.float32 if plan.split else queries.dtype),
                ("DK", width_k),
                ("SIMDS", simdgroups),
                ("SPLIT", plan.split),
                *common,
            ],
            grid=(kv_heads * 32 * simdgroups, plan.count, 1),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[pieces if plan.split else whole, pieces[:3] if plan.split else (1,)],
            output_dtypes=[mx.float32 if plan.split else queries.dtype, mx.float32],
        )
        if not plan.split:
            return outputs
        merge = kernel("merge", ("pieces", "sums", "owners", "sinks"), ("outputs",))
        return merge(
            inputs=[outputs, sums, plan.owners, logits],
            template=[("O", queries.dtype), ("CHUNKS", plan.chunks), *common],
            grid=(heads * width_v, tokens, 1),
            threadgroup=(width_v, 1, 1),
            output_shapes=[whole],
            output_dtypes=[queries.dtype],
        )[0]

    def _planned(self, shape: _Shape) -> _Plan:
        plan = self._plans[shape] = _plan(self._rows, shape)
        plan.advance(self._advanced)
        return plan

    def _numbers(self, numbers: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
        """An array of a few numbers, made once."""
        if numbers not in self._arrays:
            self._arrays[numbers] = mx.array(numbers, dtype)
        return self._arrays[numbers]
