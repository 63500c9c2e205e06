"""The change made to the attention of a loaded mlx-lm model.

mlx-lm's model files call `scaled_dot_product_attention(q, k, v, cache=…, scale=…, mask=…)` by a name of their own
module. `hook_attention` rebinds that name, once, to a function that asks the pass over packed tokens that is being
built, if there is one, and mlx-lm's own function otherwise. Nothing else of mlx-lm is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

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
def answered_by(attention: Attention | None) -> Iterator[None]:
    """While the block runs, hooked models ask this attention; None: mlx-lm's own."""
    token = _answering.set(attention)
    try:
        yield
    finally:
        _answering.reset(token)


def answering() -> Attention | None:
    """What hooked models ask now; None: mlx-lm's own attention."""
    return _answering.get()


def hook_attention(model: nn.Module) -> None:
    """Rebinds the attention function in every Python module that defines a part of `model`."""
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules.get(name)
        original = getattr(module, _ATTENTION, None)
        if original is not None and not name.startswith("mlx.") and not hasattr(original, "hooked"):
            setattr(module, _ATTENTION, _dispatcher(original))


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
        asked = _answering.get()
        if asked is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return asked.attend(queries, keys, values, cache, scale, mask, sinks)

    attention.hooked = True  # type: ignore[attr-defined]
    return attention
