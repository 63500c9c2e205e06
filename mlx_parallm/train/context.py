"""The LoRA factors that a pass with gradients uses, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.adapters.bank import LinearGroup
from mlx_parallm.adapters.forward_context import BaseProduct, ExpertCall, HeadsCall, TokenAdapters
from mlx_parallm.model.linears import AdaptedExpertLinear, AdaptedLinear

Params = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear: {"a": [in, rank], "b": [rank, out]}, float32. Those of experts have an axis
of experts before these."""


@dataclass(frozen=True, slots=True)
class LoraSpan:
    """`tokens` consecutive tokens, or positions of the head, that use the same LoRA factors."""

    tokens: int
    params: Params
    scale: float

    def factors(self, path: str, dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
        """a and scale · b of the linear at `path`, rounded to `dtype` as the adapter bank rounds them; None if it has
        none. The gradients are those of the float32 factors, so that what several calls contribute is added in
        float32."""
        pair = self.params.get(path)
        return None if pair is None else (pair["a"].astype(dtype), (self.scale * pair["b"]).astype(dtype))


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The LoRA factors of a pass with gradients: every token uses those of its span. Takes the place of serving's
    `ForwardContext`. `recomputed`: whether the backward pass computes each layer again. `dtype`: of the products of the
    factors, unless their input is float32; the factors themselves and their gradients are float32."""

    spans: tuple[LoraSpan, ...]
    recomputed: bool = False
    dtype: mx.Dtype = mx.float32
    _inputs: dict[int, tuple[mx.array, Sequence[mx.array]]] = field(default_factory=dict, repr=False)

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """base(x) + scale · (x a) b for the linear at `path`; x [B, T, in] with B · T tokens."""
        y = base(x)
        if not any(path in span.params for span in self.spans):
            return y
        parts = zip(self.spans, self._inputs_of(x), self._split(y), strict=True)
        return mx.concatenate([self._adapted(span, path, *arrays) for span, *arrays in parts]).reshape(y.shape)

    def _adapted(self, span: LoraSpan, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b, of the tokens of a span; x is one of `_inputs_of`."""
        pair = span.factors(path, self.dtype)
        if pair is None:
            return y
        a, b = pair
        return mx.addmm(y, x @ a, b) if y.dtype == self.dtype else y + (x @ a @ b).astype(y.dtype)

    def _inputs_of(self, x: mx.array) -> Sequence[mx.array]:
        """What each span has of the input of a linear. Linears that have the same input follow each other, so the last
        one is kept."""
        if id(x) not in self._inputs:
            self._inputs.clear()
            self._inputs[id(x)] = x, self._split(self._input(x))
        return self._inputs[id(x)][1]

    def _input(self, x: mx.array) -> mx.array:
        """The input of a product, as the sampler or more exactly."""
        return x if x.dtype == mx.float32 else x.astype(self.dtype)

    def _split(self, x: mx.array) -> Sequence[mx.array]:
        """[B, T, width] → what each span has of it, [tokens, width]."""
        starts = [*accumulate(span.tokens for span in self.spans)][:-1]
        tokens = x.reshape(-1, x.shape[-1])
        return list(mx.split(tokens, starts)) if starts else [tokens]

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
            if (pair := span.factors(path, self.dtype)) is not None:
                h = call.product(self._input(call.x), pair[0], call.experts)
                change = call.product(h, pair[1], call.experts)
                own = (call.adapters == number)[..., None, None]
                y = y + mx.where(own, change, 0.0).astype(y.dtype)
        return y

    def adapt_heads(self, _group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_heads`."""
        starts = [*accumulate(span.tokens for span in self.spans)][:-1]
        changed = []
        for span, x, base in zip(self.spans, mx.split(call.x, starts), mx.split(y, starts), strict=True):
            pair = span.factors(path, self.dtype)
            change = None if pair is None else call.change(self._input(x), pair[0][None], pair[1][None])
            changed.append(base if change is None else base + change.astype(y.dtype))
        return mx.concatenate(changed)

    def part(self, start: int, stop: int) -> TrainingContext:
        """See `AdapterContext.part`. The rows of a branch use the same factors."""
        stops = accumulate(span.tokens for span in self.spans)
        span = next(span for span, end in zip(self.spans, stops, strict=True) if stop <= end)
        return self if len(self.spans) == 1 else replace(self, spans=(replace(span, tokens=stop - start),), _inputs={})

    def of_paths(self, paths: Sequence[str]) -> list[Params]:
        """For each span, its factors of these linears."""
        return [{path: span.params[path] for path in paths if path in span.params} for span in self.spans]

    def with_params(self, params: Sequence[Params]) -> TrainingContext:
        spans = (replace(span, params=each) for span, each in zip(self.spans, params, strict=True))
        return replace(self, spans=tuple(spans), _inputs={})


def adapted_paths(module: nn.Module) -> tuple[str, ...]:
    """The paths, in the whole model, of a module's adapted linears."""
    return tuple(
        part.path for _, part in module.named_modules() if isinstance(part, AdaptedLinear | AdaptedExpertLinear)
    )
