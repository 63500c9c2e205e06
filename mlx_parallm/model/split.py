"""Runs a model in two parts: the trunk, from tokens to hidden states, and the head, from hidden states to logits.

mlx-lm's models run from tokens to logits in one call, which computes the logits of every token. Here the head is a
shallow copy of the module that owns the trunk: it shares every submodule and array with it, and differs in one
attribute, so the model itself is not changed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_LANGUAGE_PART = "language_model"
_HEADS = ("n_heads", "num_heads", "num_attention_heads")


def trunk_of(model: nn.Module) -> nn.Module | None:
    """The part of the model from tokens to hidden states [B, T, D]; None if it has no such part."""
    trunk = getattr(owner_of(model), "model", None)
    return trunk if isinstance(trunk, nn.Module) and isinstance(getattr(trunk, "layers", None), list) else None


def query_heads(model: nn.Module) -> int:
    """How many query heads each attention has; 1 if its module has another name for that than those of mlx-lm."""
    trunk = trunk_of(model)
    modules = [] if trunk is None else [part for layer in trunk.layers for _, part in layer.named_modules()]
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
    if isinstance(linear, nn.Linear | nn.QuantizedLinear):
        return HeadModule(path, path, linear)
    embedding = getattr(trunk_of(model), "embed_tokens", None)
    return HeadModule(path, f"{prefix}model.embed_tokens", embedding) if isinstance(embedding, _EMBEDDINGS) else None


class Head:
    """The part of a model from hidden states to logits, in the model's dtype.

    Args:
        model: one that has a trunk.
    """

    def __init__(self, model: nn.Module) -> None:
        owner = owner_of(model)
        self._owner = copy.copy(owner)
        self._owner.model = _TrunkOutput(owner.model)

    def __call__(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V]."""
        logits: mx.array = self._owner(hidden[None])
        return logits.squeeze(0)


class _TrunkOutput:
    """Takes the place of the trunk in the head, which is called with the trunk's output: returns it unchanged."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def __call__(self, hidden: mx.array, *_args: Any, **_kwargs: Any) -> mx.array:
        return hidden


def owner_of(model: nn.Module) -> nn.Module:
    """The module that owns trunk and head: the model, or its language part if it also reads images."""
    return getattr(model, _LANGUAGE_PART, model)
