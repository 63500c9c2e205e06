"""Checks that a model gives in a batch what it gives alone, on this machine, before one that no test covers serves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.errors import UnsupportedModelError

BatchedForward = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], Sequence[int]], mx.array]
"""(prompts, continuations, slots of the adapter bank) → logits [rows, steps, vocab] after each continuation token.

Each prompt is prefilled alone. Then all rows are stepped together, one token each, every row at its own offset.
"""

_PROMPT_LENGTHS = (3, 11, 6)
_STEPS = 3
_RANK = 2


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
