"""Compares the gradients of a model, in a pass as training makes it, with those of mlx-lm's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.model.families import Finding, checked, logits_alone, sample_adapter, sample_tokens
from mlx_parallm.model.mixers import training_mode
from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan, Params, TrainingContext
from mlx_parallm.train.model import TrainableModel

_SHARED, _RESTS, _ALONE = 6, (4, 3), 5
"""Tokens that two rows begin with, those that follow in each, and those of a third row."""
_RANK = 2
_SMALL = 1e-3
"""A gradient that is smaller than the largest one by this factor is compared with that instead."""


def gradients(model: TrainableModel, served: nn.Module, vocab_size: int) -> Finding:
    """Compares the gradients of some factors with those of `served` row by row, once with the layers' activations kept,
    and once with them computed again. `served`: the same model, as it serves."""
    recomputes = model.recomputes
    try:
        return max(
            (_gradients(model, served, vocab_size, again) for again in (False, True)),
            key=lambda finding: (bool(finding.problem), finding.error or 0.0),
        )
    finally:
        model.recomputes = recomputes


def _gradients(model: TrainableModel, served: nn.Module, vocab_size: int, recomputed: bool) -> Finding:
    model.recomputes = lambda *_: recomputed
    adapter = sample_adapter(model.layout, _RANK, seed=0)
    params = {
        path: {"a": pair.a.astype(mx.float32), "b": pair.b.astype(mx.float32)} for path, pair in adapter.pairs.items()
    }
    padding = _RESTS[0] - _RESTS[1]
    rows = [sample_tokens(_SHARED + size, vocab_size, 7 * number) for number, size in enumerate(_RESTS)]
    rows[1][:_SHARED] = rows[0][:_SHARED]
    alone = sample_tokens(_ALONE, vocab_size, 3)
    tokens = [*rows[0], *rows[1][_SHARED:], *[0] * padding, *alone]
    branches = [Branch(0, _SHARED, (Bucket(2, _RESTS[0], padding),)), Branch(0, 0, (Bucket(1, _ALONE, 0),))]
    weights = mx.random.normal((len(tokens), vocab_size), key=mx.random.key(1))
    second, last = _SHARED + _RESTS[0], len(tokens) - _ALONE
    weights[second + _RESTS[1] : last] = 0.0

    def together(params: Params) -> mx.array:
        spans = [LoraSpan(len(tokens), params, 1.0)]
        hidden = model.trunk(mx.array(tokens), branches, spans, learns=True).hidden
        return (model.logits(hidden, spans) * weights).sum()

    def apart(params: Params) -> mx.array:
        context = TrainingContext((LoraSpan(0, params, 1.0),), dtype=model.dtype)
        with model.bank.using(context), training_mode(served, True):
            first, other, third = (logits_alone(served, row) for row in (*rows, alone))
        rest = (other[_SHARED:] * weights[second : second + _RESTS[1]]).sum()
        return (first * weights[:second]).sum() + rest + (third * weights[last:]).sum()

    return checked("gradients", model.bank.dtype, lambda: _difference(together, apart, params))


def _difference(one: Callable[[Params], mx.array], other: Callable[[Params], mx.array], params: Params) -> float:
    """The largest relative difference of the gradients by one factor."""
    got, want = (dict(tree_flatten(mx.grad(each)(params))) for each in (one, other))
    sizes = {at: _size(each) for at, each in want.items()}
    least = _SMALL * max(sizes.values())
    return max(_size(got[at] - each) / (sizes[at] + least) for at, each in want.items())


def _size(array: mx.array) -> float:
    size: Any = mx.linalg.norm(array).item()
    return float(size)
