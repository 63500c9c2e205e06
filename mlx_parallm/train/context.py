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


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The LoRA factors of a pass with gradients: every token uses those of its span. Takes the place of serving's
    `ForwardContext`. `recomputed`: whether the backward pass computes each layer again."""

    spans: tuple[LoraSpan, ...]
    recomputed: bool = False
    _inputs: dict[int, tuple[mx.array, Sequence[mx.array]]] = field(default_factory=dict, repr=False)

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """base(x) + scale · (x a) b for the linear at `path`; x [B, T, in] with B · T tokens."""
        y = base(x)
        if not any(path in span.params for span in self.spans):
            return y
        parts = zip(self.spans, self._inputs_of(x), self._split(y), strict=True)
        return mx.concatenate([_adapted(span, path, *arrays) for span, *arrays in parts]).reshape(y.shape)

    def _inputs_of(self, x: mx.array) -> Sequence[mx.array]:
        """What each span has of the input of a linear, float32. Linears that have the same input follow each other, so
        the last one is kept."""
        if id(x) not in self._inputs:
            self._inputs.clear()
            self._inputs[id(x)] = x, self._split(x.astype(mx.float32))
        return self._inputs[id(x)][1]

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
            tuple(LoraSpan(span.tokens, each, span.scale) for span, each in zip(self.spans, params, strict=True)),
            self.recomputed,
        )


def _adapted(span: LoraSpan, path: str, x: mx.array, y: mx.array) -> mx.array:
    """y + scale · (x a) b, of the tokens of a span; x is float32."""
    pair = span.params.get(path)
    if pair is None:
        return y
    low = span.scale * (x @ pair["a"])
    return mx.addmm(y, low, pair["b"]) if y.dtype == low.dtype else y + (low @ pair["b"]).astype(y.dtype)


def adapted_paths(module: nn.Module) -> tuple[str, ...]:
    """The paths, in the whole model, of a module's adapted linears."""
    return tuple(
        part.path for _, part in module.named_modules() if isinstance(part, AdaptedLinear | AdaptedExpertLinear)
    )
