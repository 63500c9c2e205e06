"""The checks, in the order in which they run: what others build on comes first."""

from __future__ import annotations

from mlx_parallm.selftest.check import Check
from mlx_parallm.selftest.checks import (
    adapters,
    decode,
    grammar,
    plain,
    prefill,
    prefix_cache,
    publishing,
    sampling,
    step_memory,
    training,
    weights,
)

CHECKS: tuple[Check, ...] = (
    plain.CHECK,
    weights.CHECK,
    prefill.CHECK,
    decode.CHECK,
    prefix_cache.CHECK,
    adapters.CHECK,
    publishing.CHECK,
    sampling.FILTERS,
    sampling.SEEDS,
    grammar.CHECK,
    training.LOGPROBS,
    training.GRADIENTS,
    training.SHARED_PROMPTS,
    step_memory.CHECK,
)
