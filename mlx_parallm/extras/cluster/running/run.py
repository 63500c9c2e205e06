"""The steps of `mlx_parallm_train` in a cluster. ClusterRun: those on what clients have sent to be collected.
ClusterIntake: takes that from the other nodes, and acknowledges what is learnt.

    stream ─▶ known? ─▶ Collector: on the disk here, waits for an update ─▶ update ─▶ checkpoint ─▶ acknowledged
                └─ it came before: it is only acknowledged, in the end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from mlx_parallm.app.training_run import Filled, TrainingRun
from mlx_parallm.config import Config
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError, QueueFullError, RequestError, TrainingFailedError
from mlx_parallm.extras.cluster.running.collection import from_message
from mlx_parallm.extras.cluster.running.serving import joined_trainer
from mlx_parallm.extras.cluster.running.training import ClusterTraining
from mlx_parallm.extras.cluster.trajectories import Delivery
from mlx_parallm.rl.runs.records import Arrival, Feedback, GroupEntry
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.rl.trajectories import TrajectoryGroup, TrajectoryState

_AGAIN_S = 0.1


@dataclass(eq=False, slots=True)
class _HeldDelivery:
    """A message that is not acknowledged.

    Attributes:
        first: id of its first trajectory.
        waiting: ids of its trajectories that are neither trained nor dropped.
        trained: whether one of them is trained.
    """

    first: str
    delivery: Delivery
    waiting: set[str]
    trained: bool = False


class ClusterIntake:
    """Event loop's thread only.

    A message stays in the stream until its trajectories were trained on and the update is in a checkpoint, or until
    they were dropped. So if the disk of a trainer is lost, the next one gets what was in no checkpoint.
    """

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._held: dict[str, _HeldDelivery] = {}  # by the id of the first trajectory of each message
        self._of_trajectory: dict[str, _HeldDelivery] = {}
        self._done: list[Delivery] = []  # to be acknowledged
        self._told = False  # that some answers wait for feedback
        service.hooks.dropped.append(partial(self._settle, trained=False))
        service.hooks.ended.append(self._on_end)
        service.add_sink(self._on_event)

    async def run(self, deliveries: AsyncGenerator[Delivery, None]) -> None:
        """Takes messages until it is cancelled.

        Raises:
            ConflictError: another trainer reads them now.
            StorageError: the journal cannot be written.
        """
        async with aclosing(deliveries):
            async for delivery in deliveries:
                await self._take(delivery)
                await self.acknowledge()

    async def acknowledge(self) -> None:
        """Acknowledges what was dropped, and what was trained on and is in a checkpoint."""
        done, self._done = self._done, []
        for delivery in done:
            await delivery.acknowledge()

    # -- a message -------------------------------------------------------------------------------

    async def _take(self, delivery: Delivery) -> None:
        try:
            body = from_message(delivery.body)
            if isinstance(body, Arrival):
                await self._take_answers(body.trajectories, delivery)
            else:
                await self._take_reward(body)
                await delivery.acknowledge()
        except (ValueError, RequestError, QueueFullError) as error:  # it costs what it belongs to, and no more
            _log.warning("what a node has sent cannot be trained on: %s", error)
            await delivery.acknowledge()

    async def _take_answers(self, trajectories: Sequence[Trajectory], delivery: Delivery) -> None:
        first = trajectories[0].trajectory_id
        if (held := self._held.get(first)) is not None:  # it comes again because it has waited for long
            held.delivery = delivery
            return
        fates = [await self._service.parts.journal.fate(each.trajectory_id) for each in trajectories]
        known = any(fates)
        waiting = {
            each.trajectory_id
            for each, fate in zip(trajectories, fates, strict=True)
            if not known or (fate is not None and not fate.state)
        }
        if not waiting:
            await delivery.acknowledge()
            return
        held = self._held[first] = _HeldDelivery(first, delivery, waiting)
        self._of_trajectory.update(dict.fromkeys(waiting, held))
        if not known:
            self._tell_of_feedback(trajectories[0])
            await self._add(trajectories)

    def _tell_of_feedback(self, trajectory: Trajectory) -> None:
        """Logs the first answer that waits for feedback, so that a user knows why nothing is learnt from it."""
        if trajectory.collection.scorer is None and not self._told:
            self._told = True
            _log.info(
                "%s waits for POST /v1/training/feedback, because its request names no scoring_function; with "
                '"scoring_function": "reward", the reward of this run would score it. This is logged once.',
                trajectory.trajectory_id,
            )

    async def _add(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds trajectories that are new. While an update is due, it waits until they fit without dropping others."""
        collector = self._service.trajectories
        while collector.buffer.room < len(trajectories) and self._service.loop().has_enough:
            await asyncio.sleep(_AGAIN_S)
        try:
            if reason := await collector.receive(trajectories):
                _log.warning("%s: %s", trajectories[0].trajectory_id, reason)
        except RequestError:
            for each in trajectories:
                self._of_trajectory.pop(each.trajectory_id, None)
            self._held.pop(trajectories[0].trajectory_id, None)
            raise

    async def _take_reward(self, entry: GroupEntry) -> None:
        if isinstance(entry, Feedback):
            reader = EVERYTHING if entry.key is None else Reader(entry.key)
            await self._service.trajectories.feedback(entry.trajectory_id, entry.score, entry.user, reader)
        else:
            await self._service.trajectories.enter(entry)

    # -- what has ended --------------------------------------------------------------------------

    def _on_end(self, group: TrajectoryGroup) -> None:
        for member in group.in_state(TrajectoryState.TRAINED):
            self._settle(member.turns, trained=True)

    def _settle(self, turns: Sequence[Trajectory], trained: bool) -> None:
        """These are trained or dropped. A message of which none is trained is acknowledged now."""
        for turn in turns:
            if (held := self._of_trajectory.pop(turn.trajectory_id, None)) is not None:
                held.waiting.discard(turn.trajectory_id)
                held.trained |= trained
                if not held.waiting and not held.trained:
                    self._let_go(held)

    def _on_event(self, event: TrainingEvent) -> None:
        """A checkpoint has all updates that were made before it, because none is made while it is written."""
        if event.kind == "checkpoint":
            for held in [held for held in self._held.values() if not held.waiting]:
                self._let_go(held)

    def _let_go(self, held: _HeldDelivery) -> None:
        self._done.append(self._held.pop(held.first).delivery)


_POLL_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ClusterRun(TrainingRun):
    """Each step waits until enough trajectories have come. What came and was not trained on when the process ended is
    trained on first."""

    restores: ClassVar[bool] = True

    reading: asyncio.Task[None] | None = field(default=None, init=False)
    intake: ClusterIntake | None = field(default=None, init=False)

    async def _open(self, done: int, taken: int) -> None:
        assert self.cluster is not None  # only a trainer of a cluster makes this run
        self.intake = ClusterIntake(self.service)
        self.reading = asyncio.create_task(self.intake.run(self.cluster.node.deliveries()))

    async def _close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait([self.reading])

    async def _ended(self) -> None:
        if self.intake is not None:
            await self.intake.acknowledge()

    async def _fill(self, is_last: bool) -> Filled:
        self.wanted = self.config.rl_training.update_frequency
        self._report_rollout(0)
        warned, loop = False, self.service.loop()
        while not loop.has_enough:
            self._check_alive()
            assert self.reading is not None  # `_open` was called
            if self.reading.done():
                self.reading.result()  # raises what has ended it
            await asyncio.sleep(_POLL_S)
            self._report_rollout(min(loop.with_signal, self.wanted) - self.sampled)
            if not warned and (alike := loop.without_signal) >= self.wanted:
                warned = True
                _log.warning(
                    "%d answers were dropped, because all answers of their group have the same reward; an update waits "
                    "for %d answers in groups whose rewards differ",
                    alike,
                    self.wanted,
                )
        return Filled()


async def run_in_cluster(config: Config, steps: TrainingRun) -> None:
    """Makes the steps of a run as the trainer of its adapter in the cluster.

    Raises:
        ConfigError: the head does not answer, or refuses this node.
        TrainingFailedError: another process trains the adapter.
        Exception: what the run raises.
    """
    address, token = config.cluster.connect_to, config.cluster.token
    assert address is not None
    assert token is not None  # `prepare_trainer` has asked for it
    try:
        async with joined_trainer(config, steps.served) as node:
            url, secret = f"http://{address}", token.get_secret_value()
            steps.cluster = ClusterTraining(node, steps.served, steps.service, url, secret)
            await steps.run()
    except BaseExceptionGroup as group:  # of the tasks beside the run; the first error has ended the others
        raise _as_failure(_first(group)) from group
    except ConflictError as error:
        raise _as_failure(error) from error


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _as_failure(error: BaseException) -> BaseException:
    return TrainingFailedError(str(error)) if isinstance(error, ConflictError) else error
