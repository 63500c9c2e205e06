"""The losses that are summed over tokens (`core.SummedLoss`), in the trainer's terms: data, and a resolved loss.

The trainer's reductions divide by totals of the step. With totals of 1 they sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import Algorithm, LossConfig, OldLogprobs, ResolvedLoss
from mlx_parallm.core.summed import SummedLoss, TargetedTokens, TokenLoss
from mlx_parallm.train.data import Datum
from mlx_parallm.train.losses import MOST_LOG_RATIO, UpdateTotals

TOTALS = UpdateTotals(1.0, 1.0)
"""Totals with which a mean over the tokens is a sum."""

_ALGORITHMS = {
    # The gradient of -r A is -A times that of log π, where r is the ratio of the policy to itself. So this is the cross
    # entropy with weights A, which may have any sign, as those of a loss that the client has differentiated itself.
    TokenLoss.CROSS_ENTROPY: Algorithm.IMPORTANCE_SAMPLING,
    TokenLoss.IMPORTANCE_SAMPLING: Algorithm.IMPORTANCE_SAMPLING,
    TokenLoss.PPO: Algorithm.PPO,
    TokenLoss.CISPO: Algorithm.CISPO,
}


def resolved_loss(loss: SummedLoss) -> ResolvedLoss:
    """The trainer's loss with these gradients. Its value is another one for `cross_entropy`; see `loss_value`."""
    bounds = {"clip_low": 1.0 - loss.clip_low, "clip_high": loss.clip_high - 1.0, "ratio_cap": math.inf}
    settings = LossConfig(old_logprobs=OldLogprobs.SAMPLER)
    resolved = settings.resolved(_ALGORITHMS[loss.name], float32=True, max_completion_tokens=1)
    final: ResolvedLoss = resolved.model_copy(update=bounds)
    return final


def scored_positions(each: TargetedTokens) -> list[int]:
    """The positions whose logprobs the gradient needs: those with an advantage or a sampling logprob; all if there are
    none."""
    logprobs = each.sampling_logprobs or each.advantages
    positions = [at for at, values in enumerate(zip(each.advantages, logprobs, strict=True)) if any(values)]
    return positions or list(range(len(each.token_ids)))


def datum_of(each: TargetedTokens, positions: Sequence[int]) -> Datum:
    """The datum that learns the targets at these positions."""
    scored = set(positions)
    return Datum(
        token_ids=(*each.token_ids, each.targets[-1]),
        loss_weights=(0.0, *(float(at in scored) for at in range(len(each.token_ids)))),
        advantages=(0.0, *each.advantages),
        sampling_logprobs=(0.0, *each.sampling_logprobs) if each.sampling_logprobs else (),
        targets=(0, *each.targets),
    )


def loss_value(sequences: Sequence[TargetedTokens], logprobs: Sequence[Sequence[float]], loss: SummedLoss) -> float:
    """The sum of the loss over all targets, of which `logprobs` are the policy's."""
    return float(sum(_loss_of(each, np.asarray(logp), loss) for each, logp in zip(sequences, logprobs, strict=True)))


def _loss_of(each: TargetedTokens, logp: NDArray[np.float64], loss: SummedLoss) -> float:
    advantages = np.asarray(each.advantages)
    if loss.name is TokenLoss.CROSS_ENTROPY:
        return -float(advantages @ logp)
    ratio = np.exp(np.minimum(logp - np.asarray(each.sampling_logprobs), MOST_LOG_RATIO))
    if loss.name is TokenLoss.IMPORTANCE_SAMPLING:
        return -float(ratio @ advantages)
    clipped = np.clip(ratio, loss.clip_low, loss.clip_high)
    if loss.name is TokenLoss.PPO:
        return -float(np.minimum(ratio * advantages, clipped * advantages).sum())
    return -float((clipped * advantages * logp).sum())
