"""Which architectures can be batched, and what the layers of a model keep for each row.

Adding a model family that mlx-lm has: add the name of its model file to `TESTED` here and a tiny configuration to
`tests/tiny.py`; the parity tests then run for it. If its linear layers are named differently, see `hooks.py` (LoRA) and
`cpu.py`; if it has its own way to write tool calls, see `tools/syntax.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from packaging.version import Version

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.caches import Caches
from mlx_parallm.model.hooks import answered_by, install_hook
from mlx_parallm.model.layer_state import KVLayout, LayerSpec, LayerState, RecurrentSpec

TESTED = frozenset({
    *("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma2", "gemma3", "gemma3_text"),
    *("phi3", "lfm2", "mamba", "mamba2", "qwen3_next"),
})  # fmt: skip
"""mlx-lm model files for which the tests compare batched rows with solo runs. mistral uses mlx-lm's `llama`."""

TRIED = {"mlx": ("0.32.2", "0.32.4"), "mlx-lm": ("0.32.0", "0.32.2")}
"""By package, the oldest and the newest version that the tests ran with. pyproject.toml allows newer ones."""

BatchedForward = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], Sequence[int]], mx.array]
"""(prompts, continuations, slots of the adapter bank) → logits [rows, steps, vocab] after each continuation token.

Each prompt is prefilled alone. Then all rows are stepped together, one token each, every row at its own offset.
"""

_PROMPT_LENGTHS = (3, 11, 6)
_STEPS = 3
_RANK = 2


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


# -- whether an architecture can be batched ------------------------------------------------------


def untried_packages() -> tuple[str, ...]:
    """The installed packages of `TRIED` in a version outside of it, as `mlx 0.33.0`."""
    installed = ((name, metadata.version(name), ends) for name, ends in TRIED.items())
    return tuple(
        f"{name} {version}"
        for name, version, (oldest, newest) in installed
        if not Version(oldest) <= Version(version) <= Version(newest)
    )


def classify(model: nn.Module) -> Family:
    """The model's family. An UNTESTED one must pass `check_offsets` before it serves."""
    package, _, name = type(model).__module__.rpartition(".")
    tested = package == "mlx_lm.models" and name in TESTED
    reason = _refusal(model)
    if reason:
        return Family(name, Support.REFUSED, reason)
    return Family(name, Support.TESTED if tested else Support.UNTESTED)


def _refusal(model: nn.Module) -> str:
    kinds = {type(cache) for cache in Caches(model).each}
    if others := sorted(kind.__name__ for kind in kinds - {KVCache, RotatingKVCache, ArraysCache}):
        return f"its layers keep state in {', '.join(others)}; only KV caches and arrays can be batched"
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in model.modules()):
        return "its rope scaling 'dynamic' makes every position depend on the length of the whole sequence"
    return ""


def check_offsets(model: nn.Module, batched: BatchedForward, vocab_size: int) -> None:
    """Checks that rows at different offsets of one batch have the logits of their solo runs.

    Raises:
        UnsupportedModelError: the logits differ, or the batched forward fails.
    """
    _check(model, batched, vocab_size, None, (), "at different offsets")


def check_adapters(model: nn.Module, bank: AdapterBank, batched: BatchedForward, vocab_size: int) -> None:
    """Checks the same of rows with an adapter each, and one with none, in a bank that is empty before and after.

    Raises:
        UnsupportedModelError: the logits differ, or the batched forward fails.
    """
    adapters = [sample_adapter(bank.layout, min(_RANK, bank.max_rank), seed) for seed in range(min(bank.slots, 2))]
    try:
        for slot, weights in enumerate(adapters, 1):
            for _ in bank.write(slot, weights):
                pass
        _check(model, batched, vocab_size, bank, adapters, "with adapters")
    finally:
        bank.clear()


def _check(
    model: nn.Module,
    batched: BatchedForward,
    vocab_size: int,
    bank: AdapterBank | None,
    adapters: Sequence[AdapterWeights],
    how: str,
) -> None:
    rows = [_tokens(length + _STEPS, vocab_size) for length in _PROMPT_LENGTHS]
    prompts, continuations = [row[:-_STEPS] for row in rows], [row[-_STEPS:] for row in rows]
    slots = [slot if slot <= len(adapters) else 0 for slot in range(1, len(rows) + 1)]
    solo = mx.concatenate([
        _alone(model, row, bank, adapters[slot - 1] if slot else None) for row, slot in zip(rows, slots, strict=True)
    ])  # fmt: skip
    try:
        error = relative_error(batched(prompts, continuations, slots), solo)
    except Exception as failure:  # the model file is foreign code: any exception means that it cannot be batched
        raise UnsupportedModelError(f"this architecture cannot run in a batch: {failure}") from failure
    if not error <= tolerance(solo.dtype):
        raise UnsupportedModelError(
            f"this architecture cannot be batched: rows {how} differ from their solo runs by {error:.1e}"
        )


def _alone(model: nn.Module, row: Sequence[int], bank: AdapterBank | None, adapter: AdapterWeights | None) -> mx.array:
    """The last logits [1, steps, vocab] of a row by mlx-lm's own caches."""
    tokens = mx.array([list(row)])
    if bank is None or adapter is None:
        return model(tokens, cache=make_prompt_cache(model))[:, -_STEPS:]  # type: ignore[no-any-return]
    with bank.using(OneAdapter(adapter, bank.dtype)):
        return model(tokens, cache=make_prompt_cache(model))[:, -_STEPS:]  # type: ignore[no-any-return]


def sample_adapter(layout: AdapterLayout, rank: int, seed: int) -> AdapterWeights:
    """Random factors for one linear of each kind: the first of those whose paths differ in numbers only."""
    kinds: dict[str, LinearSpec] = {}
    for spec in layout:
        kinds.setdefault(re.sub(r"\d+", "", spec.path), spec)
    pairs = {}
    for spec, key in zip(kinds.values(), mx.random.split(mx.random.key(seed), max(len(kinds), 1)), strict=False):
        of_a, of_b = mx.random.split(key)
        a = mx.random.normal(spec.a_shape(rank), key=of_a) / math.sqrt(spec.in_features)
        b = mx.random.normal(spec.b_shape(rank), key=of_b) / (2 * math.sqrt(rank))
        pairs[spec.path] = LoRAPair(a, b, 1.0)
    return AdapterWeights(pairs)


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


# -- what layers keep ----------------------------------------------------------------------------


def probe(model: nn.Module) -> tuple[KVLayout, int]:
    """Builds a pass of one token; returns what its layers keep, and its logits' vocabulary size.

    The vocabulary may be larger than the tokenizer's.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values of plain or latent attention, or the
            arrays of a recurrent state.
    """
    expected, attention = Caches(model), _ProbeAttention()
    caches = [each if type(each) is ArraysCache else _ProbeCache(_window(each), attention) for each in expected.each]
    install_hook(model)
    try:
        with answered_by(attention):
            logits = model(mx.array([[0]]), cache=expected.nested(caches))
    except Exception as error:  # the model file is foreign code: any exception means that it needs another cache
        raise UnsupportedModelError(f"{_name(model)} does not run with a plain KV cache: {error}") from error
    layers = tuple(_state(model, index, cache) for index, cache in enumerate(caches))
    plain = [cache for cache in caches if isinstance(cache, _ProbeCache)]
    if 0 < sum(cache.attended for cache in plain) < len(plain):
        raise UnsupportedModelError(f"{_name(model)} keeps keys that its attention does not read, such as an indexer's")
    dtypes = {array.dtype for cache in plain for array in (cache.keys, cache.values) if array is not None}
    if len(dtypes) > 1:
        raise UnsupportedModelError(f"{_name(model)} mixes types of keys and values: {sorted(map(str, dtypes))}")
    return KVLayout(layers, dtypes.pop() if dtypes else logits.dtype), logits.shape[-1]


class _ProbeAttention:
    """Implements `hooks.Attention` for one token: gives outputs of the right shape, and finds latent attention."""

    def __init__(self) -> None:
        self.owners: dict[int, _ProbeCache] = {}

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: object,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `hooks.Attention.attend`. The scores of the keys' part with positions come as the mask."""
        owner = self.owners.get(id(keys), cache)
        if isinstance(owner, _ProbeCache):
            owner.attended = True
            scores = isinstance(mask, mx.array) and mask.shape == (*queries.shape[:3], 1)
            owner.is_latent = scores and keys.shape[1] == 1
        return mx.broadcast_to(values[:, :1], (*queries.shape[:3], values.shape[3]))


class _ProbeCache:
    """Takes the place of an empty cache for one token, and records the keys and values that the layer stores.

    `window`: that of the cache whose place it takes.
    """

    def __init__(self, window: int | None, attention: _ProbeAttention) -> None:
        self.window = window
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.window_of_mask: int | None = None
        self.attended = self.is_latent = False
        self._attention = attention

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Records and returns the token's keys and values, each [1, kv_heads, 1, head_dim]."""
        self.keys, self.values = keys, values
        self._attention.owners[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """The same again, for a layer that shares them."""
        return self.keys, self.values

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Returns None: one token needs no mask."""
        self.window_of_mask = window_size


def _window(cache: Any) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    raise UnsupportedModelError(f"a layer keeps its state in {type(cache).__name__}, which cannot be batched")


def _state(model: nn.Module, layer: int, cache: _ProbeCache | ArraysCache) -> LayerState:
    return _spec(model, layer, cache) if isinstance(cache, _ProbeCache) else _recurrent_spec(model, layer, cache)


def _spec(model: nn.Module, layer: int, cache: _ProbeCache) -> LayerSpec:
    if cache.keys is None or cache.values is None:
        raise UnsupportedModelError(f"{_name(model)}: layer {layer} stores no keys and values of its own")
    if cache.window_of_mask not in (None, cache.window):
        raise UnsupportedModelError(
            f"{_name(model)}: layer {layer} masks a window of {cache.window_of_mask} tokens but keeps "
            f"{cache.window or 'all'}"
        )
    kv_heads, head_dim_k, head_dim_v = cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]
    if cache.is_latent:
        return LayerSpec(1, head_dim_k + head_dim_v, head_dim_k, cache.window, latent=head_dim_v)
    return LayerSpec(kv_heads, head_dim_k, head_dim_v, cache.window)


def _recurrent_spec(model: nn.Module, layer: int, cache: ArraysCache) -> RecurrentSpec:
    if any(array is None for array in cache.cache):
        raise UnsupportedModelError(f"{_name(model)}: layer {layer} does not set all arrays of its state")
    return RecurrentSpec(
        tuple(tuple(array.shape[1:]) for array in cache.cache), tuple(array.dtype for array in cache.cache)
    )


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__))
