"""RewardModelWork: scores rows with reward models, and trains them, in units of device work.

    score(model, rows)        ─▶ batch ─▶ batch ─▶ …            forward; the rewards of all rows
    step(training, pairs)     ─▶ micro-step ─▶ micro-step ─▶ … ─▶ optimizer step; the loss of all pairs

Each is a job of the trainer, cut into parts that fit in one unit, as updates of adapters are (see `pacing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.rl.reward_models.fitting import Gradients, RewardModelInTraining
from mlx_parallm.rl.reward_models.model import HEAD, PackedRows, RewardModel, preference_loss, rewards
from mlx_parallm.rl.reward_models.preferences import Preference
from mlx_parallm.train.jobs import Parts
from mlx_parallm.train.model import TrunkPass
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


class RewardModelWork:
    """Asks the trainer for it. Device thread only. A batch has at most as many tokens as its micro-batches, but a
    single row or pair may have more."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def score(self, model: RewardModel, rows: Sequence[Row]) -> Future[list[float]]:
        """The rewards of these rows, in order. See `GRPOTrainer.run` for the future."""
        return self.trainer.run(self._scored(model, rows))

    def step(self, training: RewardModelInTraining, pairs: Sequence[Preference]) -> Future[StepLoss]:
        """Makes an optimizer step from the mean loss of these pairs. Its future raises TrainingFailedError if the
        gradients are not finite; if it raises, the model is as before."""
        return self.trainer.run(self._stepped(training, pairs))

    def _scored(self, model: RewardModel, rows: Sequence[Row]) -> Parts[list[float]]:
        found: dict[int, float] = {}
        for batch in batches([[tuple(row)] for row in rows], self.trainer.config.micro_batch_tokens):
            packed = PackedRows.of([rows[at] for at in batch])
            values, trunk = rewards(self.trainer.model, model.params, model.scale, packed)
            yield from self.trainer.pacer.run(_forward(trunk, values), packed.tokens.size)
            found.update(zip(batch, cast(list[float], values.tolist()), strict=True))
        return [found[at] for at in range(len(rows))]

    def _stepped(self, training: RewardModelInTraining, pairs: Sequence[Preference]) -> Parts[StepLoss]:
        total: Gradients | None = None
        loss = agreed = 0.0
        for batch in batches([[pair.chosen, pair.rejected] for pair in pairs], self.trainer.config.micro_batch_tokens):
            rows = PackedRows.of([row for at in batch for row in (pairs[at].chosen, pairs[at].rejected)])
            micro = self._gradients(training.model, rows, len(pairs), total)
            yield from self.trainer.pacer.run(micro.stages, rows.tokens.size)
            total = micro.gradients
            loss += cast(float, micro.loss.item())
            agreed += cast(float, micro.agreed.item())
        assert total is not None
        training.step(total)
        return StepLoss(loss, agreed / len(pairs))

    def _gradients(self, model: RewardModel, rows: PackedRows, count: int, before: Gradients | None) -> _MicroStep:
        """The part that these pairs (chosen and rejected in turn) have in the mean loss of `count` pairs, and its
        gradients, added to those before."""

        def objective(params: Gradients) -> tuple[mx.array, tuple[mx.array, TrunkPass]]:
            values, trunk = rewards(self.trainer.model, params, model.scale, rows, learns=True)
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
