"""Which architectures the tests know, with which versions of MLX and mlx-lm, and the checks of all others.

Adding a model family that mlx-lm has: add the name of its model file to `TESTED` here and a tiny configuration to
`tests/tiny.py`; the parity tests then run for it. A model of another family must pass checks before it serves: what it
gives in a batch is compared with what it gives alone, by mlx-lm's own caches. If a family has its own way to write tool
calls, see `tools/formats.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from packaging.version import Version

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair

TESTED = frozenset({
    *("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma2", "gemma3", "gemma3_text"),
    *("phi3", "lfm2", "mamba", "mamba2", "qwen3_next"),
})  # fmt: skip
"""mlx-lm model files for which the tests compare sequences of a batch with solo runs. mistral uses mlx-lm's `llama`."""

TRIED = {"mlx": ("0.32.4", "0.32.4"), "mlx-lm": ("0.32.2", "0.32.2")}
"""By package, the oldest and the newest version that the tests ran with. pyproject.toml allows newer ones."""


@dataclass(frozen=True, slots=True)
class Family:
    """An mlx-lm model file. `tested`: the tests compare its sequences of a batch with solo runs."""

    name: str
    tested: bool


def untried_packages() -> tuple[str, ...]:
    """The installed packages of `TRIED` in a version outside of it, as `mlx 0.33.0`."""
    installed = ((name, metadata.version(name), ends) for name, ends in TRIED.items())
    return tuple(
        f"{name} {version}"
        for name, version, (oldest, newest) in installed
        if not Version(oldest) <= Version(version) <= Version(newest)
    )


def family_of(model: nn.Module) -> Family:
    """The model's family. One that is not tested is compared with itself before it serves."""
    package, _, name = type(model).__module__.rpartition(".")
    return Family(name, package == "mlx_lm.models" and name in TESTED)


# -- comparing a model with itself -----------------------------------------------------------------


def logits_alone(
    model: nn.Module, row: Sequence[int], bank: AdapterBank | None = None, adapter: AdapterWeights | None = None
) -> mx.array:
    """Logits [T, vocab] of a sequence in one call, with the adapter or without. `bank`: what adapted linears read."""
    adapted = bank is not None and adapter is not None
    with bank.using(OneAdapter(adapter, bank.dtype)) if adapted else nullcontext():  # type: ignore[union-attr, arg-type]
        logits: mx.array = model(mx.array([list(row)]), cache=make_prompt_cache(model))
    return logits[0]


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


def sample_tokens(length: int, vocab_size: int, start: int = 7) -> list[int]:
    """A fixed sequence spread over the vocabulary."""
    return [(start + 7919 * at) % vocab_size for at in range(length)]


def relative_error(got: mx.array, want: mx.array) -> float:
    """|got - want| / |want - mean over the vocabulary| of the worst row and step, for logits [..., vocab]. Infinite if
    one is no number."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    centred = want - want.mean(axis=-1, keepdims=True)
    errors = mx.linalg.norm(got - want, axis=-1) / mx.linalg.norm(centred, axis=-1)
    worst: Any = errors.max().item()
    return math.inf if math.isnan(worst) else float(worst)


def tolerance(dtype: mx.Dtype) -> float:
    """The largest `relative_error` that rounding explains; a wrong offset gives an error of about 1."""
    return 1e-3 if dtype == mx.float32 else 5e-2


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: the largest relative error, and what went wrong; "" if nothing did."""

    check: str
    error: float | None
    problem: str = ""


def checked(check: str, dtype: mx.Dtype, measure: Callable[[], float]) -> Finding:
    """Runs a check that returns a relative error."""
    try:
        error = measure()
    except Exception as failure:  # noqa: BLE001 - the model file is foreign code, which may raise anything
        return Finding(check, None, str(failure) or type(failure).__name__)
    wrong = not error <= tolerance(dtype)  # so that not a number is wrong, too
    return Finding(check, error, f"results differ from those alone by {error:.1e}" if wrong else "")
