"""Training of a model that is split among several ranks.

    rank 0    factors ─▶ sum ─▶ trunk ─▶ head, loss ─▶ gradient of the hidden states ─▶ sum ─▶ trunk, backwards
    others    zeros   ─▶ sum ─▶ trunk                                         zeros  ─▶ sum ─▶ trunk, backwards

Rank 0 alone has policies, samples, losses and the optimizer, and computes the head. The others run the trunk beside it,
on their parts of the weights, stage by stage. What they need of rank 0, the factors and the gradient of the hidden
states, reaches them through a sum to which they add zeros.

Every rank differentiates with respect to whole factors, of which it uses its own part. So its gradient is zero outside
of that part, and the sum over the ranks is the gradient of the whole model. Rank 0 clips that, once.

All ranks must make their sums in the same order. Stages are computed one after the other, and each sum of a stage needs
the result of the one before it, so there is only one order. For this reason a layer that is computed again waits for
the gradient of its output.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from mlx_parallm.adapters.bank import AdapterBank, ModelSplit
from mlx_parallm.adapters.weights import LoRAPair
from mlx_parallm.extras.ranks.leader import Leader
from mlx_parallm.extras.ranks.operations import TrainedSpan, TrainingPass, TrainingStage
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.model import Recomputes, TrainableModel, TrunkPass
from mlx_parallm.train.pacing import Stage, StageKind


class SplitTrainableModel(TrainableModel):
    """A rank's part of a model with gradients for whole LoRA factors. `split`: how the model is divided."""

    def __init__(
        self, model: nn.Module, bank: AdapterBank, plan: CachePlan, recomputes: Recomputes, split: ModelSplit
    ) -> None:
        super().__init__(model, bank, plan, recomputes)
        self.group = split.group
        self._split = split

    def trunk(
        self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[LoraSpan] | None, learns: bool = False
    ) -> TrunkPass:
        """See `TrainableModel.trunk`. The factors are whole, and so are their gradients, on every rank."""
        trunk = super().trunk(tokens, branches, None if spans is None else self._parts(spans), learns)
        return replace(trunk, hidden=sum_gradients(self.group)(trunk.hidden))

    def _parts(self, spans: Sequence[LoraSpan]) -> list[LoraSpan]:
        """The spans with this rank's part of their factors. The gradients of each layer are added over the ranks."""
        parts = [dict(span.params) for span in spans]
        for paths in self.layer_paths:
            places = [(number, path) for number, span in enumerate(spans) for path in paths if path in span.params]
            if places:
                pairs = [spans[number].params[path] for number, path in places]
                whole = iter(_summed_together(self.group, [leaf for pair in pairs for leaf in (pair["a"], pair["b"])]))
                for number, path in places:
                    part = self._split.part(path, LoRAPair(next(whole), next(whole), 1.0))
                    parts[number][path] = {"a": part.a, "b": part.b}
        return [replace(span, params=params) for span, params in zip(spans, parts, strict=True)]

    def shared_factors(self, spans: Sequence[LoraSpan]) -> list[Params]:
        """The factors that rank 0 has, on all ranks: of each span, those of the layers. All ranks call it at once.
        `spans`: on the other ranks, their factors are zeros."""
        shared: list[dict[str, dict[str, mx.array]]] = [{} for _ in spans]
        for paths in self.layer_paths:
            for span, into in zip(spans, shared, strict=True):
                mine = {path: span.params[path] for path in paths if path in span.params}
                leaves = [mx.stop_gradient(leaf) for pair in mine.values() for leaf in (pair["a"], pair["b"])]
                if leaves:
                    total = iter(_total(self.group, leaves))
                    into |= {path: {"a": next(total), "b": next(total)} for path in mine}
                    mx.eval(into)
        return cast(list[Params], shared)


def _total(group: mx.distributed.Group, arrays: Sequence[mx.array]) -> list[mx.array]:
    """The sums of these arrays over the ranks, made together."""
    flat = mx.distributed.all_sum(mx.concatenate([each.flatten() for each in arrays]), group=group)
    *ends, _ = accumulate(each.size for each in arrays)
    return [part.reshape(each.shape) for part, each in zip(mx.split(flat, ends), arrays, strict=True)]


def _summed_together(group: mx.distributed.Group, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """The same arrays, whose gradients are added over the ranks in one sum."""

    @mx.custom_function
    def same(*arrays: mx.array) -> tuple[mx.array, ...]:
        return arrays

    @same.vjp
    def gradient(_: object, cotangents: Sequence[mx.array], __: object) -> tuple[mx.array, ...]:
        return tuple(_total(group, cotangents))

    return cast(Sequence[mx.array], same(*arrays))


# -- rank 0 --------------------------------------------------------------------------------------


class LeadingTrainableModel(SplitTrainableModel):
    """Rank 0's part. The other ranks compute their parts of every pass at the same time."""

    def __init__(
        self,
        model: nn.Module,
        bank: AdapterBank,
        plan: CachePlan,
        recomputes: Recomputes,
        split: ModelSplit,
        followers: Leader,
    ) -> None:
        super().__init__(model, bank, plan, recomputes, split)
        self._followers = followers
        self._numbers = count()
        self._dropped: list[int] = []

    def trunk(
        self, tokens: mx.array, branches: Sequence[Branch], spans: Sequence[LoraSpan] | None, learns: bool = False
    ) -> TrunkPass:
        """See `TrainableModel.trunk`.

        Raises:
            DeviceLostError: the ranks cannot begin it.
        """
        number, dropped = next(self._numbers), list(self._dropped)
        del self._dropped[: len(dropped)]
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        recomputed = spans is not None and self._recomputed(tokens, branches, spans)
        plans = [self._plan(span) for span in spans or ()]
        self._followers.repeat(TrainingPass(number, ids, list(branches), plans, learns, recomputed, dropped))
        with self._followers.together("training"):
            self.shared_factors(spans or ())
        together = _Together(number, self._followers)
        weakref.finalize(together, self._dropped.append, number)
        trunk = super().trunk(tokens, branches, spans, learns)
        return _LeadingPass(trunk.hidden, trunk.layers, trunk.paths, together)

    def _plan(self, span: LoraSpan) -> TrainedSpan:
        paths = [path for paths in self.layer_paths for path in paths if path in span.params]
        return TrainedSpan(span.tokens, span.scale, {path: span.params[path]["a"].shape[-1] for path in paths})


@dataclass(frozen=True)
class _Together:
    """A pass that the other ranks compute too. They drop it when this object is gone."""

    number: int
    followers: Leader

    def evaluate(self, arrays: object) -> None:
        """Computes a stage on all ranks. Raises DeviceLostError: it failed."""
        self.followers.repeat(TrainingStage(self.number))
        with self.followers.together("training"):
            mx.eval(arrays)


@dataclass(frozen=True)
class _LeadingPass(TrunkPass):
    together: _Together

    def stage(self, kind: StageKind, arrays: object) -> Stage:
        """See `TrunkPass.stage`."""
        return _LeadingStage(kind, arrays, together=self.together)


@dataclass(frozen=True, slots=True)
class _LeadingStage(Stage):
    together: _Together = field(kw_only=True)

    def launch(self) -> None:
        """Computes the arrays, and waits for them."""
        self.together.evaluate(self.arrays)


# -- the other ranks -----------------------------------------------------------------------------


class FollowingTraining:
    """Computes this rank's part of the passes of rank 0, together with it."""

    def __init__(self, model: nn.Module, bank: AdapterBank, plan: CachePlan, split: ModelSplit) -> None:
        self._recomputed = False
        self._model = SplitTrainableModel(model, bank, plan, lambda *_: self._recomputed, split)
        self._stages: dict[int, deque[Stage]] = {}

    def begin(self, operation: TrainingPass) -> None:
        """Begins a pass."""
        for number in operation.dropped:
            self._stages.pop(number, None)
        self._recomputed = operation.recomputed
        spans = [LoraSpan(each.tokens, self._zeros(each.ranks), each.scale) for each in operation.spans]
        factors = self._model.shared_factors(spans)
        tokens = mx.array(operation.tokens, mx.int32)

        def run(params: list[Params]) -> TrunkPass:
            mine = [replace(span, params=each) for span, each in zip(spans, params, strict=True)]
            return self._model.trunk(tokens, operation.branches, mine or None, operation.learns)

        def nothing(params: list[Params]) -> tuple[mx.array, TrunkPass]:
            trunk = run(params)
            return (0.0 * trunk.hidden).sum(), trunk  # adds zeros to the gradient that rank 0 has

        if operation.learns and any(factors):
            (_, trunk), gradients = mx.value_and_grad(nothing)(factors)
            stages = chain(trunk.forward_stages(), trunk.backward_stages(gradients))
        else:
            stages = chain(run(factors).forward_stages())
        self._stages[operation.number] = deque(stages)

    def compute(self, number: int) -> None:
        """Computes the next stage of a pass."""
        mx.eval(self._stages[number].popleft().arrays)
        if not self._stages[number]:
            del self._stages[number]

    def _zeros(self, ranks: Mapping[str, int]) -> Params:
        linears = self._model.layout.linears
        return {
            path: {"a": mx.zeros(linears[path].a_shape(rank)), "b": mx.zeros(linears[path].b_shape(rank))}
            for path, rank in ranks.items()
        }
