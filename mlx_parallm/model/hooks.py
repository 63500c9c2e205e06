"""The changes made to the functions that a loaded mlx-lm model calls.

mlx-lm's model files call `scaled_dot_product_attention(q, k, v, cache=…, scale=…, mask=…)` by a name of their own
module. `hook_model` rebinds that name, once, to a function that asks the pass over packed tokens that is being built,
if there is one, and mlx-lm's own function otherwise. In the same way, the gated delta rule and linear attention are
computed in chunks in the parts of a pass, where mlx-lm would loop over tokens; and kernels without gradients are left
out where there are gradients. Nothing else of mlx-lm is patched.
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
from mlx_lm.models.ssm import ssm_attn

from mlx_parallm.model.delta_rule import gated_delta, gates, wkv7

_FEW = 4
"""Tokens that a loop computes as fast as one chunk."""


class Attention(Protocol):
    """Answers the attention of a pass over packed tokens.

    `takes_heads`: of latent attention, the products with the matrices of each head are left to `attend`, which may make
    them in another order. Their modules give what they get, and leave a `LatentHeads` in `heads`.
    """

    takes_heads: bool
    heads: Any

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


class InPart(Enum):
    """Answers in a part of a pass: with mlx-lm's own attention, and with the delta rule in chunks. If the pass has
    gradients, no kernel runs that has none."""

    SERVED = "served"
    LEARNED = "learned"


Answering = Attention | InPart | None

_answering: ContextVar[Answering] = ContextVar("answering", default=None)


@contextmanager
def answered_by(answering: Answering) -> Iterator[None]:
    """While the block runs, hooked models ask this pass; None: mlx-lm's own functions."""
    token = _answering.set(answering)
    try:
        yield
    finally:
        _answering.reset(token)


def answering() -> Answering:
    """What hooked models ask now; None: mlx-lm's own functions."""
    return _answering.get()


def hook_model(model: nn.Module) -> None:
    """Rebinds the functions in every Python module that defines a part of `model`."""
    for name in {type(part).__module__ for part in model.modules() if not type(part).__module__.startswith("mlx.")}:
        module = sys.modules.get(name)
        for function, hook in _HOOKS.items():
            original = getattr(module, function, None)
            if original is not None and not hasattr(original, "hooked"):
                hooked = hook(original)
                hooked.hooked = True  # type: ignore[attr-defined]
                setattr(module, function, hooked)


def _attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
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
        if asked is None or isinstance(asked, InPart):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return asked.attend(queries, keys, values, cache, scale, mask, sinks)

    return attention


def _gated_delta_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,  # noqa: N803 (the caller's name)
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        use_kernel: bool = True,
        **kinds: Any,
    ) -> Any:
        has_kernel = use_kernel and mx.metal.is_available() and mx.default_device() == mx.gpu and k.shape[-1] % 32 == 0
        if not isinstance(_answering.get(), InPart) or has_kernel or mask is not None or q.shape[1] <= _FEW:
            return original(q, k, v, a, b, A_log, dt_bias, state, mask, use_kernel=use_kernel, **kinds)
        return gated_delta(q, k, v, *gates(a, b, A_log, dt_bias, **kinds), state)

    return update


def _recurrent_gla(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(q: mx.array, k: mx.array, v: mx.array, g: mx.array, *rest: Any, **others: Any) -> Any:
        if not isinstance(_answering.get(), InPart) or others.keys() != {"scale", "h"} or q.shape[2] <= _FEW:
            return original(q, k, v, g, *rest, **others)
        log_g = mx.log(mx.exp(g).astype(q.dtype).astype(mx.float32))  # of the decay as mlx-lm rounds it
        log_g = mx.broadcast_to(log_g, (q.shape[0], q.shape[2], *g.shape))
        state = None if others["h"] is None else others["h"].swapaxes(2, 3)
        q, k, v = (each.swapaxes(1, 2) for each in (q * others["scale"], k, v))
        read, state = gated_delta(q, k, v, log_g, None, state)
        return read.swapaxes(1, 2), state.swapaxes(2, 3).astype(q.dtype)

    return attention


def _ssm_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba2's rule, for which mlx-lm has a kernel for one token."""

    def update(*args: Any, **kwargs: Any) -> Any:
        return (ssm_attn if _answering.get() is InPart.LEARNED else original)(*args, **kwargs)

    return update


def _wkv7_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """RWKV-7's rule, whose kernel mlx-lm calls on Metal whether there are gradients or not."""

    def rule(
        r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        if _answering.get() is not InPart.LEARNED:
            result: tuple[mx.array, mx.array] = original(r, w, k, v, a, b, state)
            return result
        return wkv7(r, w, k, v, a, b, state)

    return rule


_HOOKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "scaled_dot_product_attention": _attention,
    "gated_delta_update": _gated_delta_update,
    "recurrent_gla": _recurrent_gla,
    "ssm_update": _ssm_update,
    "wkv7_kernel": _wkv7_kernel,
}
