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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.hooks import answered_by
from mlx_parallm.model.layer_state import Caches
from mlx_parallm.model.mixers import training_mode
from mlx_parallm.model.split import OutputHead, trunk_of, with_layers
from mlx_parallm.train.attention import PackedAttention
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.context import LoraSpan, Params, TrainingContext, adapted_paths
from mlx_parallm.train.pacing import Stage, StageKind
from mlx_parallm.train.packed_pass import SEGMENT, LearnedPass, computed_again
from mlx_parallm.train.recomputation import floats_of

Recomputes = Callable[[int, int, int], bool]
"""(tokens of a pass, tokens of its longest row, largest rank of its head's adapters, 0 for none) → whether each layer
is computed again in the backward pass, instead of keeping its activations."""


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

    The factors and their gradients are float32. Over a bfloat16 model the products of the factors are bfloat16, as the
    sampler computes them: they take less memory, and the gradients are as close to exact ones as with float32 products
    (`benchmarks/studies/mismatch.py`). float16 has too small a range for gradients.

    Attributes:
        dtype: of the products of the factors.

    Args:
        model: its linear layers are the adapted ones of `bank`.
        plan: how the model runs over packed tokens, from `prepare`.
        recomputes: asked before each pass.
        segment: tokens of a segment of recurrent layers, each of which is computed again in the backward pass.

    Raises:
        UnsupportedModelError: the model has no list of layers, or opaque caches.
    """

    def __init__(
        self, model: nn.Module, bank: AdapterBank, plan: CachePlan, recomputes: Recomputes, segment: int = SEGMENT
    ) -> None:
        if plan.layout.opaque:
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its caches are of a class of its own"
            )
        self.bank = bank
        self.recomputes, self.segment = recomputes, segment
        self.dtype = mx.bfloat16 if bank.dtype == mx.bfloat16 else mx.float32
        self._expected, self._cache_plan = Caches(model), plan
        self._outputs: list[mx.array] = []
        trunk = trunk_of(model)
        copied = with_layers(model if trunk is None else trunk, model.layers[0], self._wrapped)
        if copied is None:
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its layers cannot be accessed"
            )
        self._trunk = copied
        self._head = None if trunk is None else OutputHead(model)
        self.layer_paths = [adapted_paths(layer) for layer in model.layers]
        if self._head is None and self.layout.head is not None:
            self.layer_paths.append((self.layout.head.path,))
        """The paths of each layer's adapted linears, in the order of the forward pass."""

    def _wrapped(self, layer: nn.Module) -> _Layer:
        return _Layer(layer, self.bank, self._outputs)

    @property
    def layout(self) -> AdapterLayout:
        """The linears that can be trained."""
        return self.bank.layout

    @property
    def head_path(self) -> str:
        """The path of the adapted linear that makes logits; "" if it cannot be trained."""
        head = self.layout.head
        return "" if head is None or self._head is None else head.path

    def logits(self, hidden: mx.array, spans: Sequence[LoraSpan]) -> mx.array:
        """Logits [n, V] of hidden states [n, D], in the model's dtype. `spans`: the LoRA factors of all positions, in
        order; none: the base model."""
        with self.bank.using(TrainingContext(tuple(spans), dtype=self.dtype) if spans else None):
            return hidden if self._head is None else self._head(hidden)

    def trunk(
        self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[LoraSpan] | None, learns: bool = False
    ) -> TrunkPass:
        """Runs tokens int [N] through the trunk.

        Args:
            branches: how the tokens lie, one after the other.
            spans: the LoRA factors of all tokens, in order; None: the base model.
            learns: whether the caller differentiates the result with respect to these factors.
        """
        context = None
        if spans is not None:
            context = TrainingContext(tuple(spans), self._recomputed(tokens, branches, spans), self.dtype)
        positions = mx.array([at for branch in branches for at in branch.positions()], mx.int32)
        run = LearnedPass(PackedAttention(branches), positions, self._cache_plan, self.bank, self.segment)
        self._outputs.clear()
        with self.bank.using(context), answered_by(run), training_mode(self._trunk, True):
            hidden: mx.array = self._trunk(tokens[:, None], cache=self._expected.nested(run.caches))
        run.finish()
        outputs = tuple(self._outputs)
        self._outputs.clear()
        return TrunkPass(hidden[:, 0], outputs, self.layer_paths)

    def _recomputed(self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[LoraSpan]) -> bool:
        """Whether the backward pass computes each layer again."""
        return self.recomputes(tokens.size, max(branch.longest for branch in branches), self._head_rank(spans))

    def _head_rank(self, spans: Sequence[LoraSpan]) -> int:
        path = self.head_path
        return max((span.params[path]["a"].shape[-1] for span in spans if path in span.params), default=0)


class _Layer:
    """Wraps a layer of the trunk; the backward pass may compute it again. Other attributes are those of the layer.

    `outputs`: gets the layer's first one.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, outputs: list[mx.array]) -> None:
        self._layer = layer
        self._bank = bank
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states [N, 1, D], and whatever else the layer gets → [N, 1, D], and whatever else it gives."""
        context = self._bank.context
        if isinstance(context, TrainingContext) and context.recomputed:
            output = computed_again(self._bank, self._layer, self._run, args, kwargs)
        else:
            output = self._run(*args, **kwargs)
        self._outputs.append(floats_of(output)[0][0])
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with training_mode(self._layer, True):
            return self._layer(*args, **kwargs)
