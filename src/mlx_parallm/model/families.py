"""Which architectures may be batched: proved by this project's tests, to be checked at load, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.layers import cache_kinds

PROVED = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "phi3"})
"""mlx-lm model files that the tests cover, row against solo run. mistral is mlx-lm's `llama`."""

BatchedForward = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], mx.array]
"""(prompts, continuations) to logits [rows, steps, vocab], those after each continuation token fed in turn.

Each prompt is prefilled on its own; then all rows step together, one token each, every row at its own offset.
"""

_PROMPT_LENGTHS = (3, 11)
_STEPS = 3


class Standing(StrEnum):
    """What is known of an architecture."""

    PROVED = "proved"
    UNPROVED = "unproved"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Family:
    """An mlx-lm model file and its standing; `reason` says why a refused one is."""

    name: str
    standing: Standing
    reason: str = ""


def classify(model: nn.Module) -> Family:
    """The model's family. UNPROVED must pass `check_offsets` before it serves."""
    package, _, name = type(model).__module__.rpartition(".")
    reason = _refusal(model)
    if reason:
        return Family(name, Standing.REFUSED, reason)
    proved = package == "mlx_lm.models" and name in PROVED
    return Family(name, Standing.PROVED if proved else Standing.UNPROVED)


def _refusal(model: nn.Module) -> str:
    others = {kind.__name__ for kind in cache_kinds(model) if kind not in (KVCache, RotatingKVCache)}
    if others:
        return f"its layers keep state in {', '.join(sorted(others))}; only attention over a KV cache can be batched"
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in model.modules()):
        return "its rope scaling 'dynamic' turns every position by the length of the whole sequence"
    return ""


def check_offsets(model: nn.Module, batched: BatchedForward, vocab_size: int) -> None:
    """The load-time check: two rows at different offsets equal their solo runs.

    Raises:
        UnsupportedModelError: they differ, or the batched forward cannot run.
    """
    rows = [_tokens(length + _STEPS, vocab_size) for length in _PROMPT_LENGTHS]
    prompts, continuations = [row[:-_STEPS] for row in rows], [row[-_STEPS:] for row in rows]
    solo = mx.concatenate([model(mx.array([row]))[:, -_STEPS:] for row in rows])
    try:
        error = relative_error(batched(prompts, continuations), solo)
    except Exception as failure:  # the model file is not ours: any failure means that it cannot be batched
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
    """What rounding may make of `relative_error`; a wrong offset changes logits by their own size."""
    return 1e-3 if dtype == mx.float32 else 5e-2


def _tokens(length: int, vocab_size: int) -> list[int]:
    """A fixed sequence spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab_size for i in range(length)]
