"""Which architectures can be batched, and the shape of a model's keys and values.

Adding a model family that mlx-lm has: add the name of its model file to `TESTED` here and a tiny configuration to
`tests/tiny.py`; the parity tests then run for it. If its linear layers are named differently, see `hooks.py` (LoRA) and
`cpu.py`; if it has its own way to write tool calls, see `tools/syntax.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from mlx_parallm.errors import UnsupportedModelError

TESTED = frozenset(
    {"llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma2", "gemma3", "gemma3_text", "phi3"}
)
"""mlx-lm model files for which the tests compare batched rows with solo runs. mistral uses mlx-lm's `llama`."""

BatchedForward = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], mx.array]
"""(prompts, continuations) → logits [rows, steps, vocab] after each continuation token.

Each prompt is prefilled alone. Then all rows are stepped together, one token each, every row at its own offset.
"""

_GROUP_SIZES = (64, 32)
"""Numbers that share a scale and a bias in a quantized block. The larger one is used where it divides a head's size."""

_PROMPT_LENGTHS = (3, 11)
_STEPS = 3


class Support(StrEnum):
    """Whether an architecture can be batched: the tests show it, it is not known, or it cannot."""

    TESTED = "tested"
    UNTESTED = "untested"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Family:
    """An mlx-lm model file and its support. `reason` says why a refused one cannot be batched."""

    name: str
    support: Support
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's keys and values in each row: `[kv_heads, tokens, head_dim_k | head_dim_v]`.

    `window` is the number of last tokens that the layer attends to, itself included; None means all.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The keys and values of a whole model: one spec for each cache that the model expects, in order, and the dtype.

    `bits`: of each number in a full block; None: full blocks are not quantized.
    """

    layers: tuple[LayerSpec, ...]
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def stored(self) -> KVLayout:
        """The layout of the arrays that keep full blocks. Quantized, a head's keys or values of one token are 32-bit
        words: the numbers, and then a scale and a bias of 16 bits for each group of them."""
        if self.bits is None:
            return self
        layers = (
            replace(spec, head_dim_k=self._words(spec.head_dim_k), head_dim_v=self._words(spec.head_dim_v))
            for spec in self.layers
        )
        return KVLayout(tuple(layers), mx.uint32)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in full blocks, over all layers."""
        stored = self.stored
        return sum(s.kv_heads * (s.head_dim_k + s.head_dim_v) for s in stored.layers) * stored.dtype.size

    def quantized(self, bits: int) -> KVLayout:
        """This layout with full blocks of 8 or 4 bits for each number.

        Raises:
            UnsupportedModelError: a head's size is not a multiple of the smallest group.
        """
        sizes = {size for spec in self.layers for size in (spec.head_dim_k, spec.head_dim_v)}
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


# -- whether an architecture can be batched ------------------------------------------------------


def classify(model: nn.Module) -> Family:
    """The model's family. An UNTESTED one must pass `check_offsets` before it serves."""
    package, _, name = type(model).__module__.rpartition(".")
    reason = _refusal(model)
    if reason:
        return Family(name, Support.REFUSED, reason)
    tested = package == "mlx_lm.models" and name in TESTED
    return Family(name, Support.TESTED if tested else Support.UNTESTED)


def _refusal(model: nn.Module) -> str:
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    if others := sorted(kind.__name__ for kind in kinds - {KVCache, RotatingKVCache}):
        return f"its layers keep state in {', '.join(others)}; only attention over a KV cache can be batched"
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in model.modules()):
        return "its rope scaling 'dynamic' makes every position depend on the length of the whole sequence"
    return ""


def check_offsets(model: nn.Module, batched: BatchedForward, vocab_size: int) -> None:
    """Checks that two rows at different offsets of one batch have the logits of their solo runs.

    Raises:
        UnsupportedModelError: the logits differ, or the batched forward fails.
    """
    rows = [_tokens(length + _STEPS, vocab_size) for length in _PROMPT_LENGTHS]
    prompts, continuations = [row[:-_STEPS] for row in rows], [row[-_STEPS:] for row in rows]
    solo = mx.concatenate([model(mx.array([row]))[:, -_STEPS:] for row in rows])
    try:
        error = relative_error(batched(prompts, continuations), solo)
    except Exception as failure:  # the model file is foreign code: any exception means that it cannot be batched
        raise UnsupportedModelError(f"this architecture cannot run in a batch: {failure}") from failure
    if not error <= tolerance(solo.dtype):
        raise UnsupportedModelError(
            f"this architecture cannot be batched: rows at different offsets differ from their solo runs by {error:.1e}"
        )


def relative_error(got: mx.array, want: mx.array) -> float:
    """|got - want| / |want - mean over the vocabulary| of the worst row and step, for logits [..., vocab]."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    centred = want - want.mean(axis=-1, keepdims=True)
    errors = mx.linalg.norm(got - want, axis=-1) / mx.linalg.norm(centred, axis=-1)
    worst: Any = errors.max().item()
    return float(worst)


def tolerance(dtype: mx.Dtype) -> float:
    """The largest `relative_error` that rounding explains; a wrong offset gives an error of about 1."""
    return 1e-3 if dtype == mx.float32 else 5e-2


def _tokens(length: int, vocab_size: int) -> list[int]:
    """A fixed sequence spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab_size for i in range(length)]


# -- the shape of keys and values ----------------------------------------------------------------


def probe(model: nn.Module) -> tuple[KVLayout, int]:
    """Runs one token through the model; returns the layout of its keys and values, and its logits' vocabulary size.

    The vocabulary may be larger than the tokenizer's.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values of plain attention.
    """
    windows = [_window(cache) for cache in make_prompt_cache(model)]
    caches = [_ProbeCache() for _ in windows]
    try:
        logits = model(mx.array([[0]]), cache=caches)
    except Exception as error:  # the model file is foreign code: any exception means that it needs another cache
        raise UnsupportedModelError(f"{_name(model)} does not run with a plain KV cache: {error}") from error
    layers = tuple(_spec(model, i, cache, windows[i]) for i, cache in enumerate(caches))
    dtypes = {array.dtype for cache in caches for array in (cache.keys, cache.values) if array is not None}
    if len(dtypes) != 1:
        raise UnsupportedModelError(f"{_name(model)} mixes types of keys and values: {sorted(map(str, dtypes))}")
    return KVLayout(layers, dtypes.pop()), logits.shape[-1]


class _ProbeCache:
    """Takes the place of an empty cache for one token, and records the keys and values that the layer stores."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.window_of_mask: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Records and returns the token's keys and values, each [1, kv_heads, 1, head_dim]."""
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Returns None: one token needs no mask."""
        self.window_of_mask = window_size


def _window(cache: Any) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    raise UnsupportedModelError(f"a layer keeps its state in {type(cache).__name__}: only attention over a KV cache")


def _spec(model: nn.Module, layer: int, cache: _ProbeCache, window: int | None) -> LayerSpec:
    if cache.keys is None or cache.values is None:
        raise UnsupportedModelError(f"{_name(model)}: layer {layer} stores no keys and values of its own")
    if cache.window_of_mask not in (None, window):
        raise UnsupportedModelError(
            f"{_name(model)}: layer {layer} masks a window of {cache.window_of_mask} tokens but keeps {window or 'all'}"
        )
    kv_heads, head_dim_k = cache.keys.shape[1], cache.keys.shape[3]
    return LayerSpec(kv_heads, head_dim_k, head_dim_v=cache.values.shape[3], window=window)


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__))
