"""TrainableModel: runs the served model with gradients, on the same weight arrays, and keeps few activations.

    N tokens of samples ──trunk──▶ hidden states [N, D]
    n trained positions ──head──▶ logits [n, V]

The trunk is a shallow copy of the model's own: it shares every submodule and array with it, and differs in its list of
layers, so serving is not affected. The layers can be checkpointed (computed again in the backward pass). The head (see
`model.split`) takes hidden states that were computed before, and has LoRA factors of its own if they are trained.

To the model the tokens are a batch of single tokens, each at its own offset, as in a forward pass that serves; only
attention knows which tokens belong together. So what samples share is computed once, whatever else the model's file
does. Tokens of several adapters pass the trunk together, and each span of tokens uses its own LoRA
factors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import ExpertCall, HeadsCall, TokenAdapters
from mlx_parallm.adapters.linear_group import LinearGroup
from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.core.branches import Branch
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.caches import Caches
from mlx_parallm.model.experts import AdaptedExpertLinear
from mlx_parallm.model.families import probe
from mlx_parallm.model.hooks import AttentionStyle, answered_by
from mlx_parallm.model.linears import AdaptedLinear
from mlx_parallm.model.split import Head, layers_name_of, trunk_of
from mlx_parallm.rl.learn.attention import LayerAttention, PackedCache, PackedStream, streams
from mlx_parallm.rl.learn.recomputation import floats_of, recomputed
from mlx_parallm.rl.learn.stages import Stage, StageKind

Params = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear: {"a": [in, rank], "b": [rank, out]}, float32. Those of experts have an axis
of experts before these."""


Recomputes = Callable[[int, int, int], bool]
"""(tokens of a pass, tokens of its longest row, largest rank of its head's adapters, 0 for none) → whether each layer
is computed again in the backward pass, instead of keeping its activations."""


@dataclass(frozen=True, slots=True)
class Span:
    """`tokens` consecutive tokens, or positions of the head, that use the same LoRA factors."""

    tokens: int
    params: Params
    scale: float


@dataclass(frozen=True)
class TrunkPass:
    """One pass through the trunk. Its arrays are lazy.

    hidden: hidden states [N, D]. layers: the output of each layer, [N, 1, D]. paths: see `TrainableModel.layer_paths`.
    """

    hidden: mx.array
    layers: tuple[mx.array, ...]
    paths: Sequence[Sequence[str]]

    def forward_stages(self) -> Iterator[Stage]:
        """The stages of the forward pass, one for each layer."""
        return (self.stage(StageKind.FORWARD, output) for output in self.layers)

    def backward_stages(self, gradients: Sequence[Params]) -> Iterator[Stage]:
        """The stages that compute these gradients of the factors: one for each layer, from the last to the first."""
        for paths in reversed(self.paths):
            if leaves := [leaf for each in gradients for path in paths for leaf in each.get(path, {}).values()]:
                yield self.stage(StageKind.BACKWARD, leaves)

    def stage(self, kind: StageKind, arrays: object) -> Stage:
        """A stage of this pass."""
        return Stage(kind, arrays)


class TrainableModel:
    """The served model with gradients for LoRA factors. Device thread only.

    Args:
        model: its linear layers are the adapted ones of `bank`.
        style: how the model computes attention, from `install_hook`.
        recomputes: asked before each pass.

    Raises:
        UnsupportedModelError: the model computes attention in its own code, or has no trunk with a list of layers.
    """

    def __init__(self, model: nn.Module, bank: AdapterBank, style: AttentionStyle, recomputes: Recomputes) -> None:
        trunk = trunk_of(model)
        if style is not AttentionStyle.HOOKED or trunk is None:
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its attention or layers cannot be accessed"
            )
        self.bank = bank
        self.recomputes = recomputes
        self._trunk, layers = copy.copy(trunk), layers_name_of(model)
        self._pass = _Pass()
        setattr(self._trunk, layers, [_Layer(layer, bank, self._pass) for layer in getattr(trunk, layers)])
        self._head = Head(model)
        self._expected, self._states = Caches(model), probe(model)[0].layers
        self.layer_paths = [tuple(_paths(layer)) for layer in getattr(trunk, layers)]
        """The paths of each layer's adapted linears, in the order of the forward pass."""

    @property
    def layout(self) -> AdapterLayout:
        """The linears that can be trained."""
        return self.bank.layout

    @property
    def head_path(self) -> str:
        """The path of the adapted linear that makes logits; "" if it cannot be trained."""
        head = self.layout.head
        return "" if head is None else head.path

    def logits(self, hidden: mx.array, spans: Sequence[Span]) -> mx.array:
        """Logits [n, V] of hidden states [n, D], in the model's dtype. `spans`: the LoRA factors of all positions, in
        order; none: the base model."""
        with self.bank.using(TrainingContext(tuple(spans)) if spans else None):
            return self._head(hidden)

    def trunk(
        self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[Span] | None, learns: bool = False
    ) -> TrunkPass:
        """Runs tokens int [N] through the trunk.

        Args:
            branches: how the tokens lie, one after the other.
            spans: the LoRA factors of all tokens, in order; None: the base model.
            learns: whether the caller differentiates the result with respect to these factors.
        """
        context = None if spans is None else TrainingContext(tuple(spans), self._recomputed(tokens, branches, spans))
        self._pass.branches, self._pass.outputs = tuple(branches), []
        with self.bank.using(context):
            hidden: mx.array = self._trunk(
                tokens[:, None], cache=self._expected.nested(streams(branches, self._states))
            )
        outputs, self._pass.outputs = tuple(self._pass.outputs), []
        return TrunkPass(hidden[:, 0], outputs, self.layer_paths)

    def _recomputed(self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[Span]) -> bool:
        """Whether the backward pass computes each layer again."""
        return self.recomputes(tokens.size, max(branch.longest for branch in branches), self._head_rank(spans))

    def _head_rank(self, spans: Sequence[Span]) -> int:
        path = self.head_path
        return max((span.params[path]["a"].shape[-1] for span in spans if path in span.params), default=0)


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The LoRA factors of a pass with gradients: every token uses those of its span. Takes the place of serving's
    `ForwardContext`. `recomputed`: whether the backward pass computes each layer again."""

    spans: tuple[Span, ...]
    recomputed: bool = False

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b for the linear at `path`; x [B, T, in] and y [B, T, out] with B · T tokens."""
        if len(self.spans) == 1:
            return _adapted(self.spans[0], path, x, y)
        if not any(path in span.params for span in self.spans):
            return y
        stops = list(accumulate(span.tokens for span in self.spans))
        parts = zip(self.spans, [0, *stops], stops, strict=False)
        rows, outputs = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        return mx.concatenate(
            [_adapted(span, path, rows[start:stop], outputs[start:stop]) for span, start, stop in parts]
        ).reshape(y.shape)

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """See `AdapterContext.changes`."""
        return any(path in span.params for group in groups for path in group.specs for span in self.spans)

    def token_adapters(self) -> TokenAdapters | None:
        """See `AdapterContext.token_adapters`. The numbers are those of the spans."""
        if len(self.spans) == 1:
            return None
        numbers = np.repeat(np.arange(len(self.spans), dtype=np.uint32), [span.tokens for span in self.spans])
        return TokenAdapters(mx.array(numbers), len(self.spans))

    def adapt_experts(self, _group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_experts`. With several spans, each multiplies all pairs and keeps its own."""
        for number, span in enumerate(self.spans):
            if (pair := span.params.get(path)) is not None:
                h = call.product(call.x.astype(mx.float32), pair["a"], call.experts)
                change = span.scale * call.product(h, pair["b"], call.experts)
                own = (call.adapters == number)[..., None, None]
                y = y + mx.where(own, change, 0.0).astype(y.dtype)
        return y

    def adapt_heads(self, _group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_heads`."""
        starts = [*accumulate(span.tokens for span in self.spans)][:-1]
        changed = []
        for span, x, base in zip(self.spans, mx.split(call.x, starts), mx.split(y, starts), strict=True):
            pair = span.params.get(path)
            change = None if pair is None else call.change(x.astype(mx.float32), pair["a"][None], pair["b"][None])
            changed.append(base if change is None else base + (span.scale * change).astype(y.dtype))
        return mx.concatenate(changed)

    def part(self, start: int, stop: int) -> TrainingContext:
        """See `AdapterContext.part`. The rows of a branch use the same factors."""
        stops = accumulate(span.tokens for span in self.spans)
        span = next(span for span, end in zip(self.spans, stops, strict=True) if stop <= end)
        return self if len(self.spans) == 1 else TrainingContext((replace(span, tokens=stop - start),), self.recomputed)

    def of_paths(self, paths: Sequence[str]) -> list[Params]:
        """For each span, its factors of these linears."""
        return [{path: span.params[path] for path in paths if path in span.params} for span in self.spans]

    def with_params(self, params: Sequence[Params]) -> TrainingContext:
        return TrainingContext(
            tuple(Span(span.tokens, each, span.scale) for span, each in zip(self.spans, params, strict=True)),
            self.recomputed,
        )


def _adapted(span: Span, path: str, x: mx.array, y: mx.array) -> mx.array:
    pair = span.params.get(path)
    if pair is None:
        return y
    change = (x.astype(mx.float32) @ pair["a"]) @ pair["b"]
    return y + (span.scale * change).astype(y.dtype)


@dataclass(slots=True)
class _Pass:
    """The pass that is being built: how its tokens lie, and the output of each layer so far."""

    branches: tuple[Branch, ...] = ()
    outputs: list[mx.array] = field(default_factory=list)


class _Layer:
    """Wraps a layer of the trunk; the backward pass may compute it again. Other attributes are those of the layer.

    A function that is computed again gives gradients only to its arguments, so the layer's factors are arguments, and
    all arrays that it gets. It runs again in the backward pass, when the context of the forward pass is gone, so it
    sets up its own.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, of_pass: _Pass) -> None:
        self._layer = layer
        self._pass = of_pass
        self._bank = bank
        self._paths = tuple(_paths(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        """[N, 1, D] → [N, 1, D], and whatever else the layer gives. The first array is also one of the pass'
        outputs."""
        output = self._output(self._pass.branches, hidden, args, kwargs)
        self._pass.outputs.append(floats_of(output)[0][0])
        return output

    def _output(
        self, branches: tuple[Branch, ...], hidden: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = self._bank.context
        if not isinstance(context, TrainingContext) or not context.recomputed:
            return self._run(branches, hidden, args, kwargs)
        given, with_given = floats_of((args, kwargs))
        nesting: list[Callable[[Sequence[mx.array]], Any]] = []

        def run(arguments: tuple[list[Params], list[mx.array]], x: mx.array) -> list[mx.array]:
            params, given = arguments
            with self._bank.using(context.with_params(params)):
                outputs, with_outputs = floats_of(self._run(branches, x, *with_given(given)))
            nesting.append(with_outputs)
            return outputs

        outputs = recomputed(run)((context.of_paths(self._paths), given), hidden)
        return nesting[0](outputs)

    def _run(
        self, branches: tuple[Branch, ...], hidden: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the layer with a cache of its own, which lives for this call: the backward pass makes another one."""
        attention = LayerAttention(branches)

        def real(value: Any) -> Any:
            if isinstance(value, CacheList):
                return CacheList(*map(real, value.caches))
            return PackedCache(value, attention, self._bank) if isinstance(value, PackedStream) else value

        with answered_by(attention):
            return self._layer(hidden, *map(real, args), **{name: real(v) for name, v in kwargs.items()})


def _paths(layer: nn.Module) -> Iterator[str]:
    """The paths, in the whole model, of the layer's adapted linears."""
    return (part.path for _, part in layer.named_modules() if isinstance(part, AdaptedLinear | AdaptedExpertLinear))
