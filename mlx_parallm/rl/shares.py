"""The shares of API keys in an update, and the limit that `rl_training.loss.max_share_per_key` sets them.

A sample's weight is the sum of |d loss / d log π| over its trained tokens, where π is the policy before the step. A
factor that all samples have in common is left out. With the weight w of a token and its advantage A, it is the sum of

    policy gradients   w |A|; divided by the sum of w where the loss averages the tokens of an answer (grpo, gspo)
    distillation       w: what the teacher thinks of a token is not part of it
    cross_entropy      w
    dpo                w: the loss of a pair reads the sums over the tokens of its answers
    kto                w λ, with the weight λ of the answer's kind; 0 if it is neither desirable nor undesirable

and grpo, gspo and kto multiply it by the sample's part of its episode. Policy ratios count as 1, and so does what dpo
and kto make of the distance from the base model. A sample's share is its weight divided by the sum of all weights.

With the limit c, a key whose samples have the share p keeps min(p, c). The step becomes the sum of what all keep, and
the samples are scaled against each other so that each key has the part of the step that it keeps:

    shares          0.80   0.15   0.05
    c = 0.5 keeps   0.50   0.15   0.05     step scale 0.70

So a key moves the adapter by at most c of a whole step, and the others move it as far as they would have without the
limit. The step itself is scaled, because AdamW makes nearly the same step of gradients of any size. If an update makes
a step from each of several minibatches, this is so for their sum as far as the minibatches are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from mlx_parallm.config import Algorithm, LossKind, ResolvedLoss
from mlx_parallm.train.data import Datum, UpdateBatch

OWN_TASKS = ""
"""The owner of what the server has sampled for tasks of its own; see `Trajectory.owner`."""

Shares = Mapping[str | None, float]
"""Parts of an update, by owner."""

_AVERAGED_IN_ANSWERS = (Algorithm.GRPO, Algorithm.GSPO)


def shares_of(samples: Sequence[Datum], loss: ResolvedLoss) -> tuple[float, ...]:
    """Each sample's share of an update of these samples, in order; all 0 if none has a weight."""
    weights = [_weight(sample, loss) for sample in samples]
    total = fsum(weights)
    return tuple(weight / total if total else 0.0 for weight in weights)


def shares_by_owner(samples: Sequence[Datum], owners: Sequence[str | None], loss: ResolvedLoss) -> Shares:
    """The sums of the samples' shares. `owners`: of the groups, whose numbers the samples have."""
    shares = shares_of(samples, loss)
    of_owner: dict[str | None, list[float]] = {owners[sample.group]: [] for sample in samples}
    for sample, share in zip(samples, shares, strict=True):
        of_owner[owners[sample.group]].append(share)
    return {owner: min(1.0, fsum(values)) for owner, values in of_owner.items()}


def limited(batch: UpdateBatch, owners: Sequence[str | None], configured: ResolvedLoss) -> tuple[UpdateBatch, Shares]:
    """The batch with the limit of each key, and the metrics `keys`, their number, and `largest_key_share`, before the
    limit. What is not known to be of a key counts as one key; what the server has sampled for tasks of its own has no
    limit.

    Args:
        owners: of the groups, whose numbers the samples have.

    Returns:
        Also the parts of a whole step that the owners keep.
    """
    loss = batch.loss or configured
    shares = shares_by_owner(batch.samples, owners, loss)
    limits = {owner: 1.0 if owner == OWN_TASKS else loss.max_share_per_key for owner in shares}
    kept = {owner: min(share, limits[owner]) for owner, share in shares.items()}
    of_keys = [share for owner, share in shares.items() if owner != OWN_TASKS]
    if of_keys:
        figures = {"keys": float(len(of_keys)), "largest_key_share": max(of_keys)}
        batch = replace(batch, metrics={**batch.metrics, **figures})
    if kept == shares:
        return batch, kept
    step = fsum(kept.values())
    scales = {owner: (kept[owner] / share if share else 1.0) / step for owner, share in shares.items()}
    samples = tuple(replace(sample, loss_scale=scales[owners[sample.group]]) for sample in batch.samples)
    return replace(batch, samples=samples, step_scale=batch.step_scale * step), kept


def _weight(sample: Datum, loss: ResolvedLoss) -> float:
    trained = sample.trained()
    weights = [sample.loss_weights[at] for at in trained]
    match loss.kind:
        case LossKind.SFT | LossKind.PAIRWISE:
            return fsum(weights)
        case LossKind.KTO:
            sign = fsum(sample.advantages[at] for at in trained)
            of_kind = loss.kto_desirable_weight if sign > 0 else loss.kto_undesirable_weight
            return of_kind * sample.share * fsum(weights) if sign else 0.0
        case LossKind.POLICY_GRADIENT:
            advantages = [1.0 if loss.reads_teacher else abs(sample.advantages[at]) for at in trained]
            credited = fsum(weight * value for weight, value in zip(weights, advantages, strict=True))
            averaged = loss.algorithm in _AVERAGED_IN_ANSWERS
            return credited * sample.share / fsum(weights) if averaged else credited
