"""The jobs of reward models. `GRPOTrainer.run` runs them on the device thread.

    scored(model, rows)      ─▶ batch ─▶ batch ─▶ …            forward; the rewards of all rows
    stepped(training, pairs) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ optimizer step; the loss of all pairs

Each is cut into parts that fit in one unit, as updates of adapters are (see `pacing`). A batch has at most as many
tokens as a micro-batch of the trainer, but a single row or pair may have more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.extras.reward_models.fitting import Gradients, RewardModelInTraining
from mlx_parallm.extras.reward_models.model import HEAD, PackedRows, RewardModel, preference_loss, rewards
from mlx_parallm.extras.reward_models.preferences import Preference
from mlx_parallm.train.jobs import Parts
from mlx_parallm.train.model import TrainableModel, TrunkPass
from mlx_parallm.train.pacing import Stage, StageKind
from mlx_parallm.train.packing import Row as LaidOutRow
from mlx_parallm.train.packing import laid_out
from mlx_parallm.train.trainer import GRPOTrainer

Row = Sequence[int]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The mean loss of the pairs of a step, in nats, and the share of them that agree, both before the step."""

    loss: float
    agreement: float


def scored(trainer: GRPOTrainer, model: RewardModel, rows: Sequence[Row]) -> Parts[list[float]]:
    """The rewards of these rows, one number each, in order."""
    found: dict[int, float] = {}
    for batch in batches([[tuple(row)] for row in rows], trainer.config.micro_batch_tokens):
        packed = PackedRows.of([rows[at] for at in batch])
        values, trunk = rewards(trainer.model, model.params, model.scale, packed)
        yield from trainer.pacer.run(_forward(trunk, values), packed.tokens.size)
        found.update(zip(batch, cast(list[float], values.tolist()), strict=True))
    return [found[at] for at in range(len(rows))]


def stepped(trainer: GRPOTrainer, training: RewardModelInTraining, pairs: Sequence[Preference]) -> Parts[StepLoss]:
    """Makes an optimizer step from the mean loss of these pairs. Raises TrainingFailedError: the gradients are not
    finite. If it raises, the model is as before."""
    total: Gradients | None = None
    loss = agreed = 0.0
    for batch in batches([[pair.chosen, pair.rejected] for pair in pairs], trainer.config.micro_batch_tokens):
        rows = PackedRows.of([row for at in batch for row in (pairs[at].chosen, pairs[at].rejected)])
        micro = _micro_step(trainer.model, training.model, rows, len(pairs), total)
        yield from trainer.pacer.run(micro.stages, rows.tokens.size)
        total = micro.gradients
        loss += cast(float, micro.loss.item())
        agreed += cast(float, micro.agreed.item())
    assert total is not None
    training.step(total)
    return StepLoss(loss, agreed / len(pairs))


def _micro_step(
    base: TrainableModel, model: RewardModel, rows: PackedRows, count: int, before: Gradients | None
) -> _MicroStep:
    """The part that these pairs (chosen and rejected in turn) have in the mean loss of `count` pairs, and its
    gradients, added to those before."""

    def objective(params: Gradients) -> tuple[mx.array, tuple[mx.array, TrunkPass]]:
        values, trunk = rewards(base, params, model.scale, rows, learns=True)
        return preference_loss(values[0::2], values[1::2]) / count, (values, trunk)

    (loss, (values, trunk)), gradients = mx.value_and_grad(objective)(model.params)
    if before is not None:
        gradients = tree_map(mx.add, before, gradients)
    chosen, rejected = mx.stop_gradient(values[0::2]), mx.stop_gradient(values[1::2])
    agreed = ((chosen > rejected) + 0.5 * (chosen == rejected)).sum()
    head = Stage(StageKind.VALUES_BACKWARD, gradients[HEAD]["weight"], 1)
    stages = [*_forward(trunk, [loss, agreed]), head, *trunk.backward_stages([gradients])]
    return _MicroStep(loss, agreed, gradients, stages)


@dataclass(frozen=True, slots=True)
class _MicroStep:
    """Lazy arrays, and the stages that compute them. `agreed`: pairs whose chosen answer has the higher reward."""

    loss: mx.array
    agreed: mx.array
    gradients: Gradients
    stages: Sequence[Stage]


def _forward(trunk: TrunkPass, result: object) -> Iterator[Stage]:
    yield from trunk.forward_stages()
    yield Stage(StageKind.VALUES, result, 1)


def batches(groups: Sequence[Sequence[tuple[int, ...]]], most: int) -> Iterator[list[int]]:
    """Splits groups of rows, by their indices, into batches of at most `most` tokens, what rows share counted once. A
    larger group is a batch of its own. Groups that begin alike come together, whatever their order."""
    batch: list[int] = []
    for at in sorted(range(len(groups)), key=lambda at: tuple(groups[at])):
        rows = [LaidOutRow.of(row) for each in (*batch, at) for row in groups[each]]
        if batch and laid_out(rows)[0].tokens > most:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch
