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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.forward_context import ExpertCall, HeadsCall, TokenAdapters
from mlx_parallm.adapters.linear_group import LinearGroup
from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.core.branches import Branch
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.caches import Caches
from mlx_parallm.model.experts import AdaptedExpertLinear
from mlx_parallm.model.hooks import answered_by, answering
from mlx_parallm.model.linears import AdaptedLinear
from mlx_parallm.model.mixers import training_mode
from mlx_parallm.model.split import Head, trunk_of, with_layers
from mlx_parallm.rl.learn.packed_pass import LearnedPass, again_with, arrays_of, caches_in, put_arrays
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
        plan: how the model runs over packed tokens, from `prepare`.
        recomputes: asked before each pass.

    Raises:
        UnsupportedModelError: the model has no list of layers, or opaque caches.
    """

    def __init__(self, model: nn.Module, bank: AdapterBank, plan: CachePlan, recomputes: Recomputes) -> None:
        if plan.layout.opaque:
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its caches are of a class of its own"
            )
        self.bank = bank
        self.recomputes = recomputes
        self._expected, self._cache_plan = Caches(model), plan
        self._outputs: list[mx.array] = []
        trunk = trunk_of(model)
        copied = with_layers(model if trunk is None else trunk, model.layers[0], self._wrapped)
        if copied is None:
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its layers cannot be accessed"
            )
        self._trunk = copied
        self._head = None if trunk is None else Head(model)
        self.layer_paths = [tuple(_paths(layer)) for layer in model.layers]
        if self._head is None and self.layout.head is not None:
            self.layer_paths.append((self.layout.head.path,))
        """The paths of each layer's adapted linears, in the order of the forward pass."""

    def _wrapped(self, layer: nn.Module) -> _Layer:
        return _Layer(layer, self.bank, self._outputs, self._cache_plan.compatible)

    @property
    def layout(self) -> AdapterLayout:
        """The linears that can be trained."""
        return self.bank.layout

    @property
    def head_path(self) -> str:
        """The path of the adapted linear that makes logits; "" if it cannot be trained."""
        head = self.layout.head
        return "" if head is None or self._head is None else head.path

    def logits(self, hidden: mx.array, spans: Sequence[Span]) -> mx.array:
        """Logits [n, V] of hidden states [n, D], in the model's dtype. `spans`: the LoRA factors of all positions, in
        order; none: the base model."""
        with self.bank.using(TrainingContext(tuple(spans)) if spans else None):
            return hidden if self._head is None else self._head(hidden)

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
        run = LearnedPass(branches, self._cache_plan, self.bank)
        self._outputs.clear()
        with self.bank.using(context), answered_by(run):
            hidden: mx.array = self._trunk(tokens[:, None], cache=self._expected.nested(run.caches))
        run.finish()
        outputs = tuple(self._outputs)
        self._outputs.clear()
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


class _Layer:
    """Wraps a layer of the trunk; the backward pass may compute it again. Other attributes are those of the layer.

    A function that is computed again gives gradients only to its arguments, so the layer's factors are arguments, and
    all arrays that it gets, also those that its caches have from other layers. It runs again in the backward pass, when
    the pass and the context of the forward pass are gone, so it sets up its own. `outputs`: gets the layer's first one.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, outputs: list[mx.array], compatible: bool) -> None:
        self._layer = layer
        self._bank = bank
        self._outputs = outputs
        self._compatible = compatible
        self._paths = tuple(_paths(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states [N, 1, D], and whatever else the layer gets → [N, 1, D], and whatever else it gives."""
        context = self._bank.context
        if isinstance(context, TrainingContext) and context.recomputed:
            output = self._recomputed(context, args, kwargs)
        else:
            output = self._run(args, kwargs)
        self._outputs.append(floats_of(output)[0][0])
        return output

    def _recomputed(self, context: TrainingContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caches, of_pass = caches_in([*args, *kwargs.values()]), answering()
        given, with_given = floats_of((args, kwargs, arrays_of(caches)))
        nesting: list[Callable[[Sequence[mx.array]], Any]] = []

        def run(arguments: tuple[list[Params], list[mx.array]], x: mx.array) -> list[mx.array]:
            params, others = arguments
            args, kwargs, arrays = with_given([x, *others])
            again = of_pass.again() if isinstance(of_pass, LearnedPass) else None
            fresh, (args, kwargs) = again_with(again, caches, (args, kwargs))
            put_arrays(fresh, arrays)
            with self._bank.using(context.with_params(params)), answered_by(again):
                output = self._run(args, kwargs)
            outputs, with_outputs = floats_of((output, arrays_of(fresh)))
            if not nesting:  # else arrays of the backward pass would stay
                nesting.append(with_outputs)
            if again is not None:
                again.finish()
            return outputs

        outputs = recomputed(run)((context.of_paths(self._paths), given[1:]), given[0])
        output, arrays = nesting[0](outputs)
        put_arrays(caches, arrays)
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with training_mode(self._layer, True) if self._compatible else nullcontext():
            return self._layer(*args, **kwargs)


def _paths(layer: nn.Module) -> Iterator[str]:
    """The paths, in the whole model, of the layer's adapted linears."""
    return (part.path for _, part in layer.named_modules() if isinstance(part, AdaptedLinear | AdaptedExpertLinear))
