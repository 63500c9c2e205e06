"""How much each sample of past updates has pushed an answer, by products of gradients. A job of the trainer.

TracIn (Pruthi et al. 2020, arXiv 2002.08484) with one checkpoint: a step of length η along the gradient of a sample's
loss L changes the log-probability of an answer by about

    -η ⟨∇L, P ∇ log π(answer)⟩

With AdamW, P is 1 / (√v + ε) for each value, where v is the running mean of squared gradients; without the optimizer's
state it is 1. Both gradients are those at the same weights, and not at those that each update started from.

    score     that change, in nats: positive if the sample made the answer more likely
    cosine    the same for gradients of length 1, measured with P: how alike their directions are
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.config import Algorithm, OptimizerConfig, ResolvedLoss
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum
from mlx_parallm.train.forwards import MicroStepInput, TrainingForwards
from mlx_parallm.train.jobs import Parts
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.pacing import Stage, StageKind
from mlx_parallm.train.packing import pack, split_samples
from mlx_parallm.train.policy import Policy, PolicyState
from mlx_parallm.train.trainer import GRPOTrainer

_TOGETHER = 8
"""Most terms whose gradients are computed in one pass, each with room for its own."""


@dataclass(frozen=True, slots=True)
class Term:
    """What one sample added to the loss of its update.

    Attributes:
        data: of the sample; of a pair, those of both answers.
        loss: of the update. `totals`: what it is divided by.
        step: learning rate times step scale, and times what clipping left of the gradients.
    """

    data: Sequence[Datum]
    loss: ResolvedLoss
    totals: UpdateTotals
    step: float


@dataclass(frozen=True, slots=True)
class Push:
    """What a sample did to the answer; see the module."""

    score: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Pushes:
    """One for each term, in order. `logprob`: of the answer, in nats. `preconditioned`: whether the optimizer's state
    was there."""

    pushes: Sequence[Push]
    logprob: float
    preconditioned: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """Where gradients are computed. `optimizer`: whose state scales them, if that of `state` has made no step.
    `loaded`: the policy that was loaded for this."""

    state: PolicyState
    optimizer: PolicyState | None = None
    loaded: Policy | None = None


def influences(trainer: GRPOTrainer, weights: Weights, answer: Datum, terms: Sequence[Term]) -> Parts[Pushes]:
    """Computes what each term has pushed the tokens of the answer that have a weight. Terms share backward passes as
    far as they fit. Nothing of any policy changes."""
    gradients = _Gradients(trainer, weights.state)
    loss = alone(trainer.config.loss, algorithm=Algorithm.CROSS_ENTROPY)
    ((target, logprob),) = yield from gradients.of([Term([answer], loss, UpdateTotals(1.0, 1.0), 1.0)])
    metric = _Metric.of([gradients.state, weights.optimizer], trainer.config.optimizer)
    along = metric.applied(target)
    length = yield from gradients.summed(along, target)
    held = _Held((_TOGETHER + 1) * sum(leaf.nbytes for pair in along.values() for leaf in pair.values()))
    trainer.hold(held)
    del target
    found = []
    for some in gradients.together(terms):
        for term, (of_term, _) in zip(some, (yield from gradients.of(some)), strict=True):
            product = yield from gradients.summed(along, of_term)
            square = yield from gradients.summed(metric.applied(of_term), of_term)
            lengths = math.sqrt(length * square)
            found.append(Push(term.step * product, product / lengths if lengths else 0.0))
    return Pushes(found, -logprob, metric.means is not None)


def alone(loss: ResolvedLoss, **changes: object) -> ResolvedLoss:
    """The loss without what does not depend on rewards: the KL divergence from the base model, and the entropy."""
    return loss.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0, **changes})


def as_sampled_now(datum: Datum) -> Datum:
    """The datum as if the weights had sampled it: its policy ratios are 1, so that none is clipped, whatever was learnt
    since."""
    return replace(datum, sampling_logprobs=(), on_policy=True)


@dataclass(eq=False)
class _Held:
    """Device memory of a job."""

    nbytes: int


class _Gradients:
    """Gradients at fixed weights, computed in parts."""

    def __init__(self, trainer: GRPOTrainer, state: PolicyState) -> None:
        self.state = state
        self._trainer, self._forwards = trainer, TrainingForwards(trainer.model)
        self._most = trainer.config.micro_batch_tokens
        # arrays of their own: MLX adds up the gradients of arguments that are the same array
        self._states = [replace(state, params=tree_map(mx.stop_gradient, state.params)) for _ in range(_TOGETHER)]
        self._values = sum(leaf.size for pair in state.params.values() for leaf in pair.values())

    def together(self, terms: Sequence[Term]) -> Iterator[list[Term]]:
        """Splits terms, in order, into those whose gradients are computed in one pass, which reads the base model's
        weights once for all of them. A term of several data is alone."""
        some, room = list[Term](), 0
        for term in terms:
            tokens = len(term.data[0].token_ids) if len(term.data) == 1 else self._most
            if some and (tokens > room or len(some) == _TOGETHER):
                yield some
                some = []
            room = (room if some else self._most) - tokens
            some.append(term)
        if some:
            yield some

    def of(self, terms: Sequence[Term]) -> Parts[list[tuple[Params, float]]]:
        """The gradients of each term, and its loss. Several terms have one datum each."""
        batches = [
            list(split_samples([*map(as_sampled_now, term.data)], self._most, whole_groups=True)) for term in terms
        ]
        totals: list[Params | None] = [None] * len(terms)
        losses = [0.0] * len(terms)
        for at in range(max(map(len, batches))):
            packed = [pack(of_term[at]) for of_term in batches]
            step = self._forwards.gradients(
                [
                    MicroStepInput(batch, state, term.loss, term.totals, total)
                    for batch, state, term, total in zip(packed, self._states, terms, totals, strict=False)
                ]
            )
            yield from self._trainer.pacer.run(step.stages, sum(batch.tokens.size for batch in packed))
            totals = [result.gradients for result in step.results]
            losses = [loss + cast(float, result.loss.item()) for loss, result in zip(losses, step.results, strict=True)]
        return [(total, loss) for total, loss in zip(totals, losses, strict=True) if total is not None]

    def summed(self, one: Params, other: Params) -> Parts[float]:
        """The inner product of two trees of values."""
        parts = [(one[path][name] * other[path][name]).sum() for path in other for name in other[path]]
        total = mx.stack(parts).sum()
        yield from self._trainer.pacer.run([Stage(StageKind.OPTIMIZER, total, self._values)], 0)
        return cast(float, total.item())


@dataclass(frozen=True, slots=True)
class _Metric:
    """The factor P of each value. `means`: AdamW's running means of squared gradients, by path; None: P is 1."""

    means: Mapping[str, Any] | None
    bias: float
    eps: float

    @classmethod
    def of(cls, states: Sequence[PolicyState | None], optimizer: OptimizerConfig) -> _Metric:
        """That of the first state whose optimizer has made a step."""
        for state in states:
            if state is not None and (steps := int(state.optimizer["step"].item())):
                return cls(state.optimizer, 1 - optimizer.beta2**steps, optimizer.eps)
        return cls(None, 1.0, 0.0)

    def applied(self, tree: Params) -> Params:
        if self.means is None:
            return tree
        return {
            path: {
                name: leaf / (mx.sqrt(self.means[path][name]["v"] / self.bias) + self.eps)
                for name, leaf in pair.items()
            }
            for path, pair in tree.items()
        }
