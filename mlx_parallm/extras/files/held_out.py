"""HeldOut: the loss of the adapter in training on rows that are not trained on, by forward passes of the trainer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.extras.files.forms import FileKind
from mlx_parallm.train.data import Datum, mismatched
from mlx_parallm.train.learner import Learner

LOSS, PERPLEXITY, ACCURACY = "held_out_loss", "held_out_perplexity", "held_out_accuracy"
"""Metrics. The loss is the training loss of all held-out rows as one batch. The perplexity is exp of the mean loss of a
token (SFT). The accuracy is the part of pairs in the right order (DPO), or of answers on their side of z0 (KTO)."""


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; infinite if that is too large."""
    return math.exp(loss) if loss < 700 else math.inf


class HeldOut:
    """The held-out data of one run.

    Args:
        adapter: its name.
        data: as an update would learn from them, with their groups and advantages.
    """

    def __init__(
        self, learner: Learner, adapter: str, kind: FileKind, data: Sequence[Datum], loss: ResolvedLoss
    ) -> None:
        self._learner, self._adapter, self._kind, self._loss = learner, adapter, kind, loss
        self._data = data
        self._mismatched = mismatched(data) if kind is FileKind.KTO else []
        self._base: list[float] | None = None  # of the base model, which stays the same

    async def metrics(self) -> Mapping[str, float]:
        """The figures of the adapter as it is in training. Raises StepFailedError: they could not be computed."""
        if self._kind is FileKind.SFT:
            logprobs = await self._learner.logprobs(self._adapter, self._data)
            weights = ([each.loss_weights[at] for at in each.trained()] for each in self._data)
            pairs = [pair for one in map(zip, logprobs, weights) for pair in one]
            loss = -fsum(logp * weight for logp, weight in pairs) / fsum(weight for _, weight in pairs)
            return {LOSS: loss, PERPLEXITY: perplexity(loss)}
        changes = await self._changes()
        of_rows, of_kl = changes[: len(self._data)], changes[len(self._data) :]
        return self._of_pairs(of_rows) if self._kind is FileKind.DPO else self._of_verdicts(of_rows, of_kl)

    async def _changes(self) -> list[float]:
        """Σ log(π / π_base) of each row, and of the mismatched ones behind them, in nats."""
        every = [*self._data, *self._mismatched]
        if self._base is None:
            self._base = list(map(fsum, await self._learner.logprobs(None, every)))
        ours = map(fsum, await self._learner.logprobs(self._adapter, every))
        return [one - base for one, base in zip(ours, self._base, strict=True)]

    def _of_pairs(self, changes: Sequence[float]) -> Mapping[str, float]:
        """See `train.losses.dpo`."""
        margins: dict[int, float] = defaultdict(float)
        for datum, change in zip(self._data, changes, strict=True):
            margins[datum.group] += _sign(datum) * change
        losses = [_softplus(-self._loss.preference_beta * margin) for margin in margins.values()]
        right = sum(margin > 0 for margin in margins.values())
        return {LOSS: fsum(losses) / len(losses), ACCURACY: right / len(losses)}

    def _of_verdicts(self, changes: Sequence[float], of_kl: Sequence[float]) -> Mapping[str, float]:
        """See `train.losses.kto`. Good and bad answers weigh the same in sum, as in an update that has both."""
        z0 = max(0.0, fsum(of_kl) / len(of_kl))
        ahead: dict[float, list[float]] = defaultdict(list)
        for datum, change in zip(self._data, changes, strict=True):
            ahead[_sign(datum)].append(_sign(datum) * (change - z0))
        beta = self._loss.preference_beta
        means = [fsum(math.exp(-_softplus(beta * each)) for each in values) / len(values) for values in ahead.values()]
        right = sum(each > 0 for values in ahead.values() for each in values)
        return {LOSS: fsum(means) / len(means), ACCURACY: right / len(self._data)}


def _sign(datum: Datum) -> float:
    return math.copysign(1.0, fsum(datum.advantages[at] for at in datum.trained()))


def _softplus(value: float) -> float:
    """log(1 + exp(value))."""
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))
