"""The served model as the trainer sees it: the same weights, in forwards that have gradients and keep little.

    tokens [B, T] ──trunk──▶ hidden [B, T, D] ──trained positions──▶ [N, D] ──head──▶ logits [N, V]

mlx-lm's models run from tokens to logits in one call. `trunk` and `head` are shallow copies of two of its modules:
they share every submodule and every array with the model, and differ in one attribute each, so serving sees no change.
The trunk's layers can be checkpointed; the head takes hidden states where the model would compute them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank, LinearGroup
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.adapted import AdaptedLinear

Params = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear: {"a": [in, rank], "b": [rank, out]}, float32."""


class TrainableModel:
    """Device thread only.

    Args:
        model: with the adapted linears of `bank` in their places.
        checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        UnsupportedModelError: the model is not made of a trunk with layers and a head.
    """

    def __init__(self, model: nn.Module, bank: AdapterBank, checkpoint_layers: bool) -> None:
        owner = getattr(model, "language_model", model)
        trunk = getattr(owner, "model", None)
        if trunk is None or not isinstance(getattr(trunk, "layers", None), list):
            raise UnsupportedModelError(f"{type(model).__module__} cannot be trained: it has no list of layers")
        self.bank = bank
        self._trunk = copy.copy(trunk)
        self._trunk.layers = [_Layer(layer, bank, checkpoint_layers) for layer in trunk.layers]
        self._head = copy.copy(owner)
        self._head.model = _Given(trunk)

    @property
    def layout(self) -> AdapterLayout:
        """Of the linears that may be trained."""
        return self.bank.layout

    def hidden(self, tokens: mx.array, params: Params, scale: float) -> mx.array:
        """Tokens int [B, T] from position 0, right-padded at will → hidden states [B, T, D] under these factors."""
        with self.bank.using(TrainingContext(params, scale)):
            return cast(mx.array, self._trunk(tokens))

    def base_hidden(self, tokens: mx.array) -> mx.array:
        """The same without any adapter: slot 0's."""
        return cast(mx.array, self._trunk(tokens))

    def logits(self, hidden: mx.array) -> mx.array:
        """[N, D] → [N, V], in the model's dtype."""
        logits: mx.array = self._head(hidden[None])
        return logits[0]


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Stands where a `ForwardContext` stands in serving: every token uses `params`, in float32, with gradients."""

    params: Params
    scale: float

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b, x [B, T, in] and y [B, T, out] of the linear at `path`."""
        pair = self.params.get(path)
        if pair is None:
            return y
        change = (x.astype(mx.float32) @ pair["a"]) @ pair["b"]
        return y + (self.scale * change).astype(y.dtype)


class _Layer:
    """A layer of the trunk; all else that the trunk asks of it is the layer's own.

    `mx.checkpoint` gives gradients to a function's arguments only, so the layer's factors are passed to it. It runs
    the function again in the backward pass, when the forward that made the context is long over.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, checkpointed: bool) -> None:
        self._layer = layer
        self.bank = bank
        self._checkpointed = checkpointed
        self._paths = frozenset(_paths(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        context = self.bank.context
        if not self._checkpointed or not isinstance(context, TrainingContext):
            return cast(mx.array, self._layer(hidden, *args, **kwargs))

        def run(params: Params, x: mx.array) -> mx.array:
            with self.bank.using(TrainingContext(params, context.scale)):
                return cast(mx.array, self._layer(x, *args, **kwargs))

        checkpointed: Callable[[Params, mx.array], mx.array] = mx.checkpoint(run)
        return checkpointed({path: context.params[path] for path in self._paths & context.params.keys()}, hidden)


class _Given:
    """Stands in the place of the trunk in a head: what the head passes to it is its answer already."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def __call__(self, hidden: mx.array, *_args: Any, **_kwargs: Any) -> mx.array:
        return hidden


def _paths(layer: nn.Module) -> Iterator[str]:
    """Of the layer's adapted linears, in the whole model."""
    return (part.path for _, part in layer.named_modules() if isinstance(part, AdaptedLinear))
