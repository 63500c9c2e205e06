"""Runs a model in two parts: the trunk, from tokens to hidden states, and the head, from hidden states to logits.

mlx-lm's models run from tokens to logits in one call, which computes the logits of every token. Here the head is a
shallow copy of the module that owns the trunk: it shares every submodule and array with it, and differs in one
attribute, so the model itself is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_LANGUAGE_PART = "language_model"
_EMBEDDING_NAMES = ("embed_tokens", "embeddings")
_HEADS = ("n_heads", "num_heads", "num_attention_heads")


def trunk_of(model: nn.Module) -> nn.Module | None:
    """The part of the model from tokens to hidden states [B, T, D]; None if it has no such part."""
    place = _trunk_place(model)
    return None if place is None else getattr(owner_of(model), place[0])


def layers_name_of(model: nn.Module) -> str:
    """The name by which the trunk calls its list of layers."""
    place = _trunk_place(model)
    assert place is not None
    return place[1]


def _trunk_place(model: nn.Module) -> tuple[str, str] | None:
    """The names by which the owner of the trunk calls it, and the trunk its list of layers: the part that has what
    mlx-lm's `layers` gives."""
    parts = ((name, part) for name, part in owner_of(model).items() if isinstance(part, nn.Module))
    lists = ((name, of, each) for name, part in parts for of, each in part.items() if isinstance(each, list) and each)
    return next(((name, of) for name, of, each in lists if each[0] is model.layers[0]), None)


def query_heads(model: nn.Module) -> int:
    """How many query heads each attention has; 1 if its module has another name for that than those of mlx-lm."""
    modules = [part for layer in model.layers for _, part in layer.named_modules()]
    return max(
        (heads for part in modules for name in _HEADS if isinstance(heads := getattr(part, name, None), int)), default=1
    )


@dataclass(frozen=True, slots=True)
class HeadModule:
    """The module whose weight [vocab, hidden] makes logits of hidden states.

    path: of the linear lm_head, as adapters name it, whether or not the model has one.
    module_path: of the module: the linear itself or, in a tied model, the embedding.
    """

    path: str
    module_path: str
    module: nn.Module

    @property
    def tied(self) -> bool:
        return isinstance(self.module, _EMBEDDINGS)


def head_module_of(model: nn.Module) -> HeadModule | None:
    """The head's linear, or the embedding of a tied model; None if it has neither where mlx-lm's models have it."""
    owner = owner_of(model)
    prefix = "" if owner is model else f"{_LANGUAGE_PART}."
    path, linear = f"{prefix}lm_head", getattr(owner, "lm_head", None)
    if isinstance(linear, nn.Linear | nn.QuantizedLinear | nn.QQLinear):
        return HeadModule(path, path, linear)
    if (place := _trunk_place(model)) is None:
        return None
    embeddings = ((each, getattr(getattr(owner, place[0]), each, None)) for each in _EMBEDDING_NAMES)
    return next(
        (HeadModule(path, f"{prefix}{place[0]}.{n}", part) for n, part in embeddings if isinstance(part, _EMBEDDINGS)),
        None,
    )


class Head:
    """The part of a model from hidden states to logits, in the model's dtype.

    Args:
        model: one that has a trunk.
    """

    def __init__(self, model: nn.Module) -> None:
        owner, place = owner_of(model), _trunk_place(model)
        assert place is not None
        self._owner = copy.copy(owner)
        self._output = _TrunkOutput(getattr(owner, place[0]))
        setattr(self._owner, place[0], self._output)

    def __call__(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V]."""
        with self._output.of(hidden[None]):
            logits: mx.array = self._owner(mx.zeros((1, len(hidden)), mx.uint32))
        return logits.squeeze(0)


class _TrunkOutput:
    """Takes the place of the trunk in the head: returns hidden states that were computed before, for any tokens."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk
        self._hidden: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    @contextmanager
    def of(self, hidden: mx.array) -> Iterator[None]:
        """While the block runs, a call returns these hidden states."""
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> mx.array:
        assert self._hidden is not None
        return self._hidden


def owner_of(model: nn.Module) -> nn.Module:
    """The module that owns trunk and head: the model, or its language part if it also reads images."""
    return getattr(model, _LANGUAGE_PART, model)
