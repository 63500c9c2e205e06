"""RewardModelWork: scores rows with reward models, and trains them, in units of device work.

    score(model, rows)        ─▶ batch ─▶ batch ─▶ …            forward; the rewards of all rows
    step(training, pairs)     ─▶ micro-step ─▶ micro-step ─▶ … ─▶ optimizer step; the loss of all pairs

One job runs after another. Each is cut into parts that fit in one unit, as updates of adapters are (see `pacing`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakSet

import mlx.core as mx
from mlx.utils import tree_map

from mlx_parallm.errors import StepFailedError, TrainingFailedError
from mlx_parallm.rl.reward_models.fitting import Gradients, RewardModelInTraining
from mlx_parallm.rl.reward_models.model import HEAD, PackedRows, RewardModel, preference_loss, rewards
from mlx_parallm.rl.reward_models.preferences import Preference
from mlx_parallm.train.model import TrainableModel, TrunkPass
from mlx_parallm.train.pacing import Pacer, Stage, StageKind
from mlx_parallm.train.packing import Row as LaidOutRow
from mlx_parallm.train.packing import laid_out

T = TypeVar("T")

Row = Sequence[int]

_FAILED = "the reward model's work failed on the device"


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The mean loss of the pairs of a step, in nats, and the share of them that agree, both before the step."""

    loss: float
    agreement: float


@dataclass(eq=False, slots=True)
class _Job:
    """`parts`: each step runs one part, within one unit; the result is what it returns."""

    parts: Generator[None, None, Any]
    future: Future[Any] = field(default_factory=Future)


class RewardModelWork:
    """Implements `core.TrainingWork`. Device thread only, except `peak_bytes`.

    Args:
        micro_batch_tokens: most tokens of a batch. A single row or pair may have more.
    """

    def __init__(self, trainable: TrainableModel, micro_batch_tokens: int) -> None:
        self.trainable = trainable
        self._tokens = micro_batch_tokens
        self._pacer = Pacer()
        self._queue: list[_Job] = []
        self._held: WeakSet[RewardModel | RewardModelInTraining] = WeakSet()

    def score(self, model: RewardModel, rows: Sequence[Row]) -> Future[list[float]]:
        """The rewards of these rows, in order. The future is completed on the device thread. It raises StepFailedError
        if this failed or was cancelled."""
        return self._add(self._scored(model, rows))

    def step(self, training: RewardModelInTraining, pairs: Sequence[Preference]) -> Future[StepLoss]:
        """Makes an optimizer step from the mean loss of these pairs. Its future is as that of `score`, and raises
        TrainingFailedError if the gradients are not finite; in either case the model is as before."""
        return self._add(self._stepped(training, pairs))

    def hold(self, what: RewardModel | RewardModelInTraining) -> None:
        """Counts the memory of this as long as somebody refers to it."""
        self._held.add(what)

    def cancel(self, future: Future[Any]) -> None:
        """Fails what was asked for with this future, if it is not done."""
        for job in [job for job in self._queue if job.future is future]:
            self._fail(job, StepFailedError(_FAILED))

    def _add(self, parts: Generator[None, None, T]) -> Future[T]:
        job = _Job(parts)
        self._queue.append(job)
        return job.future

    def _fail(self, job: _Job, error: Exception) -> None:
        self._queue.remove(job)
        job.parts.close()
        job.future.set_exception(error)

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self._pacer.budget = seconds

    def advance(self) -> None:
        """Runs a part of a job, or several short jobs. Gradients that are not finite concern their caller only."""
        self._pacer.begin()
        while self._queue and self._run(self._queue[0]) and self._pacer.has_room:
            pass

    def _run(self, job: _Job) -> bool:
        """Runs the next part of a job. Returns whether the job has ended."""
        try:
            next(job.parts)
        except StopIteration as end:
            self._queue.remove(job)
            job.future.set_result(end.value)
            return True
        except TrainingFailedError as error:
            self._fail(job, error)
            return True
        return False

    def reset(self) -> None:
        """Fails the current job, which failed."""
        if self._queue:
            self._fail(self._queue[0], StepFailedError(_FAILED))

    @property
    def bytes_held(self) -> int:
        return sum(each.nbytes for each in self._held)

    @property
    def bytes_of_updates(self) -> int:
        """While jobs wait: the most that a pass has allocated."""
        return self._pacer.pass_bytes if self._queue else 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes that MLX has held since the process started."""
        return self._pacer.peak_bytes

    # -- jobs ------------------------------------------------------------------------------------

    def _scored(self, model: RewardModel, rows: Sequence[Row]) -> Generator[None, None, list[float]]:
        found: dict[int, float] = {}
        for batch in batches([[tuple(row)] for row in rows], self._tokens):
            packed = PackedRows.of([rows[at] for at in batch])
            values, trunk = rewards(self.trainable, model.params, model.scale, packed)
            yield from self._pacer.run(_forward(trunk, values), packed.tokens.size)
            found.update(zip(batch, cast(list[float], values.tolist()), strict=True))
        return [found[at] for at in range(len(rows))]

    def _stepped(self, training: RewardModelInTraining, pairs: Sequence[Preference]) -> Generator[None, None, StepLoss]:
        total: Gradients | None = None
        loss = agreed = 0.0
        for batch in batches([[pair.chosen, pair.rejected] for pair in pairs], self._tokens):
            rows = PackedRows.of([row for at in batch for row in (pairs[at].chosen, pairs[at].rejected)])
            micro = self._gradients(training.model, rows, len(pairs), total)
            yield from self._pacer.run(micro.stages, rows.tokens.size)
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
            values, trunk = rewards(self.trainable, params, model.scale, rows, learns=True)
            return preference_loss(values[0::2], values[1::2]) / count, (values, trunk)

        (loss, (values, trunk)), gradients = mx.value_and_grad(objective)(model.params)
        if before is not None:
            gradients = tree_map(mx.add, before, gradients)
        chosen, rejected = mx.stop_gradient(values[0::2]), mx.stop_gradient(values[1::2])
        agreed = ((chosen > rejected) + 0.5 * (chosen == rejected)).sum()
        head = Stage(StageKind.HEAD_BACKWARD, gradients[HEAD]["weight"], 1)
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
    yield Stage(StageKind.HEAD, result, 1)


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
