"""Runs a model in two parts: the trunk, from tokens to hidden states, and the head, from hidden states to logits.

mlx-lm's models run from tokens to logits in one call, which computes the logits of every token. Here the head is a
shallow copy of the module that owns the trunk: it shares every submodule and array with it, and differs in one
attribute, so the model itself is not changed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_LANGUAGE_PART = "language_model"


def trunk_of(model: nn.Module) -> nn.Module | None:
    """The part of the model from tokens to hidden states [B, T, D]; None if it has no such part."""
    name = _trunk_name(model)
    return None if name is None else getattr(owner_of(model), name)


def _trunk_name(model: nn.Module) -> str | None:
    """The name by which the owner of the trunk calls it: the part that has what mlx-lm's `layers` gives, and takes
    tokens and caches."""
    parts = ((name, part) for name, part in owner_of(model).items() if isinstance(part, nn.Module))
    name = next((name for name, part in parts if any(each is model.layers[0] for each in part.modules())), None)
    if name is not None:
        try:
            inspect.signature(owner_of(model)[name].__call__).bind(None, cache=None)
        except TypeError:
            return None
    return name


def with_layers(module: nn.Module, first: nn.Module, wrap: Callable[[nn.Module], object]) -> nn.Module | None:
    """A shallow copy of a module, down to the list of layers that begins with `first`, which has wrapped ones. None if
    there is no such list in it."""
    for name, part in module.items():
        if isinstance(part, list) and part and part[0] is first:
            changed: Any = [wrap(each) for each in part]
        else:
            changed = with_layers(part, first, wrap) if isinstance(part, nn.Module) else None
        if changed is not None:
            copied = copy.copy(module)
            copied[name] = changed
            return copied
    return None


class OutputHead:
    """The part of a model from hidden states to logits, in the model's dtype.

    Args:
        model: one that has a trunk.
    """

    def __init__(self, model: nn.Module) -> None:
        owner, trunk = owner_of(model), _trunk_name(model)
        assert trunk is not None
        self._owner = copy.copy(owner)
        self._output = _TrunkOutput(getattr(owner, trunk))
        setattr(self._owner, trunk, self._output)

    def __call__(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V]."""
        self._output.hidden = hidden[None]
        try:
            logits: mx.array = self._owner(mx.zeros((1, len(hidden)), mx.uint32))
        finally:
            self._output.hidden = None  # what is held cannot be overwritten in place
        return logits.squeeze(0)


class _TrunkOutput:
    """Takes the place of the trunk in the head: returns hidden states that were computed before, for any tokens."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk
        self.hidden: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def __call__(self, *_args: Any, **_kwargs: Any) -> mx.array:
        assert self.hidden is not None
        return self.hidden


def owner_of(model: nn.Module) -> nn.Module:
    """The module that owns trunk and head: the model, or its language part if it also reads images."""
    return getattr(model, _LANGUAGE_PART, model)
