"""The change made to the attention of a loaded mlx-lm model.

mlx-lm's model files call `scaled_dot_product_attention(q, k, v, cache=…, scale=…, mask=…)` by a name of their own
module. `install_hook` rebinds that name, once, to a function that asks the pass over packed tokens that is being built,
if there is one, and mlx-lm's own function otherwise. Nothing else of mlx-lm is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.model.recurrent import install_mixers

_ATTENTION = "scaled_dot_product_attention"


class Attention(Protocol):
    """Answers the attention of a pass over packed tokens."""

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
        """Attention of queries [N, heads, 1, head_dim]. `keys`, `values`: as a cache of the pass has returned them,
        which need not be the `cache` that the layer names."""
        ...


_answering: ContextVar[Attention | None] = ContextVar("attention", default=None)


@contextmanager
def answered_by(attention: Attention) -> Iterator[None]:
    """While the block runs, hooked models ask this attention."""
    token = _answering.set(attention)
    try:
        yield
    finally:
        _answering.reset(token)


class AttentionStyle(Enum):
    """Which code computes a model's attention, and the shape of the scores if it is the model's own code."""

    HOOKED = "by the cache"
    OWN = "by the model, scores [B, heads, T, S]"
    OWN_GROUPED = "by the model, scores [B, kv_heads, group, T, S]"


def install_hook(model: nn.Module) -> AttentionStyle:
    """Rebinds the attention function in every Python module that defines a part of `model`, and installs the mixers of
    its recurrent layers.

    Models with attention code of their own, such as gemma2, call no such function; their caches must return the keys
    and values.
    """
    hooked = install_mixers(model)
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules.get(name)
        original = getattr(module, _ATTENTION, None)
        if original is None or name.startswith("mlx."):
            continue
        if not hasattr(original, "hooked"):
            setattr(module, _ATTENTION, _dispatcher(original))
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
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        answering = _answering.get()
        if answering is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return answering.attend(queries, keys, values, cache, scale, mask, sinks)

    attention.hooked = True  # type: ignore[attr-defined]
    return attention
