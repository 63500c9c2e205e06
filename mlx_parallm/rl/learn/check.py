"""Checks that a model has the gradients of its own code, before one that no test covers is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.core.branches import Branch, Bucket
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.checks import sample_adapter, tolerance
from mlx_parallm.rl.learn.model import Params, Span, TrainableModel, TrainingContext

_SHARED, _RESTS, _ALONE = 6, (4, 3), 5
"""Tokens that two rows begin with, those that follow in each, and those of a third row."""
_RANK = 2
_SMALL = 1e-3
"""A gradient that is smaller than the largest one by this factor is compared with that instead."""


def check_gradients(model: TrainableModel, served: nn.Module, vocab_size: int) -> None:
    """Compares the gradients of some factors, in a pass as training makes it, with those of `served` row by row.

    Raises:
        UnsupportedModelError: they differ, or the model cannot be differentiated.
    """
    adapter = sample_adapter(model.layout, _RANK, seed=0)
    params = {
        path: {"a": pair.a.astype(mx.float32), "b": pair.b.astype(mx.float32)} for path, pair in adapter.pairs.items()
    }
    padding = _RESTS[0] - _RESTS[1]
    rows = [_tokens(_SHARED + size, vocab_size, 7 * number) for number, size in enumerate(_RESTS)]
    rows[1][:_SHARED] = rows[0][:_SHARED]
    alone = _tokens(_ALONE, vocab_size, 3)
    tokens = [*rows[0], *rows[1][_SHARED:], *[0] * padding, *alone]
    branches = [Branch(0, _SHARED, (Bucket(2, _RESTS[0], padding),)), Branch(0, 0, (Bucket(1, _ALONE, 0),))]
    weights = mx.random.normal((len(tokens), vocab_size), key=mx.random.key(1))
    second, last = _SHARED + _RESTS[0], len(tokens) - _ALONE
    weights[second + _RESTS[1] : last] = 0.0

    def together(params: Params) -> mx.array:
        spans = [Span(len(tokens), params, 1.0)]
        hidden = model.trunk(mx.array(tokens), branches, spans, learns=True).hidden
        return (model.logits(hidden, spans) * weights).sum()

    def apart(params: Params) -> mx.array:
        with model.bank.using(TrainingContext((Span(0, params, 1.0),))):
            first, other, third = (_logits(served, row) for row in (*rows, alone))
        rest = (other[_SHARED:] * weights[second : second + _RESTS[1]]).sum()
        return (first * weights[:second]).sum() + rest + (third * weights[last:]).sum()

    try:
        error = _difference(together, apart, params)
    except Exception as failure:  # the model file is foreign code: any exception means that it cannot be trained
        raise UnsupportedModelError(f"this model has no gradients here: {failure}") from failure
    if not error <= tolerance(model.bank.dtype):
        raise UnsupportedModelError(
            f"this model can be served and not trained: its gradients differ from those of mlx-lm's code by {error:.1e}"
        )


def _logits(model: nn.Module, row: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([row]), cache=make_prompt_cache(model))
    return logits[0]


def _difference(one: Callable[[Params], mx.array], other: Callable[[Params], mx.array], params: Params) -> float:
    """The largest relative difference of the gradients by one factor."""
    got, want = (dict(tree_flatten(mx.grad(each)(params))) for each in (one, other))
    sizes = {at: _size(each) for at, each in want.items()}
    least = _SMALL * max(sizes.values())
    return max(_size(got[at] - each) / (sizes[at] + least) for at, each in want.items())


def _size(array: mx.array) -> float:
    size: Any = mx.linalg.norm(array).item()
    return float(size)


def _tokens(length: int, vocab_size: int, start: int) -> list[int]:
    return [(start + 7919 * at) % vocab_size for at in range(length)]
