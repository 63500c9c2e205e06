"""The one attention hook: lets a cache of ours do the attention itself.

mlx-lm's model files call `scaled_dot_product_attention(q, k, v, cache=…, scale=…, mask=…)` by a name of
their own module. At load that name is rebound, once, to a function that hands the call to
`cache.attend` when the cache offers it and is otherwise mlx-lm's own. Nothing else of mlx-lm is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_NAME = "scaled_dot_product_attention"


class AttentionStyle(Enum):
    """Where a model's attention is computed, and the shape of its scores where that is its own code."""

    HOOKED = "by the cache"
    OWN = "by the model, scores [B, heads, T, S]"
    OWN_GROUPED = "by the model, scores [B, kv_heads, group, T, S]"


def install_hook(model: nn.Module) -> AttentionStyle:
    """Rebinds the attention function in every module that defines a part of `model`.

    A model that attends with its own code (gemma2 does) has no such function; its caches must fetch.
    """
    hooked = False
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules.get(name)
        original = getattr(module, _NAME, None)
        if original is None or name.startswith("mlx."):
            continue
        if not hasattr(original, "hooked"):
            setattr(module, _NAME, _dispatcher(original))
        hooked = True
    if hooked:
        return AttentionStyle.HOOKED
    grouped = any(getattr(part, "repeats", 1) > 1 for part in model.modules())
    return AttentionStyle.OWN_GROUPED if grouped else AttentionStyle.OWN


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        attend = getattr(cache, "attend", None)
        if attend is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return attend(queries, scale, mask, sinks)  # type: ignore[no-any-return]

    attention.hooked = True  # type: ignore[attr-defined]
    return attention
