"""Rows of several adapters in one batch: each must equal its adapter merged into the base and run alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

import mlx.nn as nn
from harness import assert_same_tokens, make_harness, solo
from lora import merged

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import RequestFinished

TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def changed_by(model: Callable[[], nn.Module], adapters: Mapping[str, AdapterWeights], shortest: int) -> Counter[str]:
    """Checks prefill, packed prefill and decode of 12 rows, some of the base and as many of each adapter.

    Args:
        shortest: tokens of the first answer; each has one more than the one before.

    Returns:
        How many rows of each adapter say something else than the base.
    """
    models = {name: merged(model(), weights) for name, weights in adapters.items()} | {"base": model()}
    harness = make_harness(model(), max_rows=6)
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()} | {"base": BASE_ADAPTER}
    rows = [(name, row) for name, row in zip([*refs] * (12 // len(refs)), prompts(12, 70, seed=3), strict=True)]
    for i, (name, row) in enumerate(rows):
        harness.submit(str(i), row, shortest + i, adapter=refs[name])
        for _ in range(i % 3):
            harness.loop.step()
    harness.run()
    changed = Counter[str]()
    for i, (name, row) in enumerate(rows):
        assert isinstance(harness.terminal(str(i)), RequestFinished)
        assert_same_tokens(harness.tokens(str(i)), solo(models[name], row, shortest + i), TINY)
        changed[name] += harness.tokens(str(i)) != solo(models["base"], row, shortest + i).tokens
    return changed
