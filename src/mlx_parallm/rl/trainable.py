"""The served model as the trainer sees it: the same weights, in forwards that have gradients and keep little.

    N tokens of prompts and their continuations ──trunk──▶ hidden [N, D]
    n trained positions ──head──▶ logits [n, V]

mlx-lm's models run from tokens to logits in one call. `trunk` and `head` are shallow copies of two of its modules:
they share every submodule and every array with the model, and differ in one attribute each, so serving sees no change.
The trunk's layers can be checkpointed; the head takes hidden states where the model would compute them.

As in packed prefill, to the model the tokens are a batch of single ones, each at its own offset; only attention knows
how they lie. So a prompt is computed once for all its continuations, whatever the model's file does elsewhere, and
tokens of several adapters in training pass the trunk together: each span of them has its own factors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank, LinearGroup
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.adapted import AdaptedLinear
from mlx_parallm.model.attention import AttentionStyle
from mlx_parallm.rl.packed_attention import Lie, PackedCache, PackedStream

Params = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear: {"a": [in, rank], "b": [rank, out]}, float32."""


@dataclass(frozen=True, slots=True)
class Span:
    """So many tokens in a row, which use these factors."""

    tokens: int
    params: Params
    scale: float


class TrainableModel:
    """Device thread only.

    Args:
        model: with the adapted linears of `bank` in their places.
        style: who computes the model's attention, of `install_hook`.
        checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        UnsupportedModelError: the model attends by its own code, or is not made of a trunk with layers and a head.
    """

    def __init__(self, model: nn.Module, bank: AdapterBank, style: AttentionStyle, checkpoint_layers: bool) -> None:
        owner = getattr(model, "language_model", model)
        trunk = getattr(owner, "model", None)
        if style is not AttentionStyle.HOOKED or not isinstance(getattr(trunk, "layers", None), list):
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its attention or its layers are out of reach"
            )
        assert isinstance(trunk, nn.Module)
        self.bank = bank
        self.checkpoint_layers = checkpoint_layers
        self._outputs: list[mx.array] = []
        self._trunk = copy.copy(trunk)
        self._trunk.layers = [_Layer(layer, bank, checkpoint_layers, self._outputs) for layer in trunk.layers]
        self._head = copy.copy(owner)
        self._head.model = _Given(trunk)
        self.layer_paths = [tuple(_paths(layer)) for layer in trunk.layers]
        """Of each layer's linears, in the order of the forward."""

    @property
    def layout(self) -> AdapterLayout:
        """Of the linears that may be trained."""
        return self.bank.layout

    def hidden(
        self, tokens: mx.array, lies: Sequence[Lie], spans: Sequence[Span] | None
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Hidden states [N, D] of tokens int [N], which lie as `lies` say; `spans` cover them all. None: the base's.

        With them what each layer put out on the way.
        """
        stream = PackedStream.of(lies)
        self._outputs.clear()
        with self.bank.using(None if spans is None else TrainingContext(tuple(spans))):
            hidden: mx.array = self._trunk(tokens[:, None], cache=[stream] * len(self._trunk.layers))
        outputs = tuple(self._outputs)
        self._outputs.clear()
        return hidden[:, 0], outputs

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V], in the model's dtype."""
        logits: mx.array = self._head(hidden[None])
        return logits[0]


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Stands where a `ForwardContext` stands in serving: every token uses its span's factors, with gradients."""

    spans: tuple[Span, ...]

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b, x [N, 1, in] and y [N, 1, out] of the linear at `path`; [B, T, in] of a single span."""
        if len(self.spans) == 1:
            return _adapted(self.spans[0], path, x, y)
        if not any(path in span.params for span in self.spans):
            return y
        stops = list(accumulate(span.tokens for span in self.spans))
        parts = zip(self.spans, [0, *stops], stops, strict=False)
        return mx.concatenate([_adapted(span, path, x[start:stop], y[start:stop]) for span, start, stop in parts])

    def of_paths(self, paths: Sequence[str]) -> list[Params]:
        """The factors of these linears, of each span."""
        return [{path: span.params[path] for path in paths if path in span.params} for span in self.spans]

    def with_params(self, params: Sequence[Params]) -> TrainingContext:
        return TrainingContext(
            tuple(Span(span.tokens, each, span.scale) for span, each in zip(self.spans, params, strict=True))
        )


def _adapted(span: Span, path: str, x: mx.array, y: mx.array) -> mx.array:
    pair = span.params.get(path)
    if pair is None:
        return y
    change = (x.astype(mx.float32) @ pair["a"]) @ pair["b"]
    return y + (span.scale * change).astype(y.dtype)


class _Layer:
    """A layer of the trunk; all else that the trunk asks of it is the layer's own.

    `mx.checkpoint` gives gradients to a function's arguments only, so the layer's factors are passed to it. It runs
    the function again in the backward pass, when the forward that made the context is long over.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, checkpointed: bool, outputs: list[mx.array]) -> None:
        self._layer = layer
        self._outputs = outputs
        self._bank = bank
        self._checkpointed = checkpointed
        self._paths = tuple(_paths(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """[N, 1, D] → [N, 1, D], which is added to `outputs` too."""
        output = self._output(hidden, args, kwargs)
        self._outputs.append(output)
        return output

    def _output(self, hidden: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
        context = self._bank.context
        if not self._checkpointed or not isinstance(context, TrainingContext):
            return self._run(hidden, args, kwargs)

        def run(params: list[Params], x: mx.array) -> mx.array:
            with self._bank.using(context.with_params(params)):
                return self._run(x, args, kwargs)

        checkpointed: Callable[[list[Params], mx.array], mx.array] = mx.checkpoint(run)
        return checkpointed(context.of_paths(self._paths), hidden)

    def _run(self, hidden: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
        """The layer itself. Its cache lives in this call only: the backward pass makes its own."""

        def real(value: Any) -> Any:
            return PackedCache(value) if isinstance(value, PackedStream) else value

        return cast(mx.array, self._layer(hidden, *map(real, args), **{name: real(v) for name, v in kwargs.items()}))


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
