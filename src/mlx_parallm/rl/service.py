"""TrainingService: the asyncio face of training: several trainees, one buffer, one stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mlx_parallm.adapters.names import check_name, check_tag
from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterRef,
    CheckpointCard,
    Collection,
    GivenTrajectory,
    TrainingStatus,
    Trajectory,
    TrajectoryCard,
    UpdateReport,
)
from mlx_parallm.errors import ConflictError, UnknownModelError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.events import EventHub, Listener
from mlx_parallm.rl.gate import Evaluate, Gate
from mlx_parallm.rl.groups import Drop, Group, State
from mlx_parallm.rl.intake import Intake
from mlx_parallm.rl.loop import TrainingLoop
from mlx_parallm.rl.parts import Learner, Publisher, Scorers
from mlx_parallm.rl.settings import LoopSettings
from mlx_parallm.rl.spill import SpillFile
from mlx_parallm.rl.trainee import PolicyOf, Trainee, TraineeParts

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What training is made of.

    `imitation`: the loss is cross_entropy. `evaluate`: asked for every version before it goes live. `policy_of`: the
    policy that a live version without a trainer's checkpoint starts as. `spill`: where trajectories end up.
    """

    learner: Learner
    publisher: Publisher
    scorers: Scorers
    settings: LoopSettings
    imitation: bool = False
    evaluate: Evaluate | None = None
    policy_of: PolicyOf | None = None
    spill: SpillFile | None = None


class TrainingService:
    """Implements `core.TrainingClient`, and `Sink` for a CollectingEngine. Event loop's thread only.

    A trajectory trains the adapter that drew it. What the base model drew trains the default adapter, while the base
    is in its lineage.
    """

    def __init__(self, parts: TrainingParts, default_adapter: str) -> None:
        self._parts = parts
        self._default = default_adapter
        self._hub = EventHub()
        self._buffer = TrajectoryBuffer(parts.settings.buffer_size, self._ended)
        waits = parts.settings.group_timeout_s, parts.settings.feedback_timeout_s
        self._intake = Intake(self._buffer, parts.scorers, *waits, self._wake, self._hub.emit)
        gate = Gate(parts.settings.kl_bound, parts.evaluate)
        self._trainee_parts = TraineeParts(
            parts.learner, parts.publisher, gate, parts.settings, self._hub.emit, parts.policy_of
        )
        self._loops: dict[str, TrainingLoop] = {}
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- starting and ending ---------------------------------------------------------------------

    async def start_adapter(self, name: str) -> None:
        """Trains this adapter too; see `Trainee.open`. One that was paused goes on; one whose name means a version
        from elsewhere by now begins again with that.

        Raises:
            InvalidRequestError, ConflictError: it cannot be trained here, or not with what is live.
        """
        async with self._starting:
            loop = self._loops.get(name)
            if loop is None:
                trainee = Trainee(check_name(name, "lora_adapter"), self._trainee_parts, name == self._default)
                loop = TrainingLoop(trainee, self._buffer, self._parts.settings, self._hub.emit, self._parts.imitation)
                await loop.open()
                self._loops[name] = loop
                self._spawn(loop.run())
            elif (live := loop.trainee.live) is not None and loop.trainee.lineage.lag(live) is None:
                await loop.open()
            loop.resume()

    async def close(self) -> None:
        """No update begins any more, and one that is under way is given up; what no checkpoint has is saved.

        Raises:
            Exception: of the first adapter that could not be saved; the others are.
        """
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._intake.close()
        errors = await asyncio.gather(*(loop.close() for loop in self._loops.values()), return_exceptions=True)
        self._hub.close()
        if self._parts.spill is not None:
            await self._parts.spill.close()
        for error in errors:
            if error is not None:
                raise error

    # -- trajectories ----------------------------------------------------------------------------

    async def check(self, collection: Collection, adapter: AdapterRef) -> None:
        """See `core.TrainingClient.check`."""
        loop = self._loops.get(self._trainee_of(adapter))
        if loop is None or not loop.trainee.lineage.knew(adapter):
            raise ConflictError(
                f"{adapter} is not trained here, so nothing that it draws can be collected; name an adapter that is, "
                "or POST /v1/training/start.",
                param="collect_trajectory",
            )
        await self._parts.scorers.check(collection)

    def collected(self, group: Sequence[Trajectory]) -> str:
        """See `collecting.Sink`."""
        drawn_by = group[0].adapter
        trainee = self._trainee_of(drawn_by)
        loop = self._loops.get(trainee)
        dropped = self._intake.add(trainee, group, loop.judge(drawn_by) if loop else Drop.FOREIGN)
        return "" if dropped is None else f"{self._why(dropped, drawn_by)}: these trajectories will not be trained on."

    def _why(self, dropped: Drop, drawn_by: AdapterRef) -> str:
        settings = self._parts.settings
        if dropped is Drop.BUFFER_FULL:
            return f"There is no room for them in the buffer of {settings.buffer_size} trajectories"
        loop = self._loops.get(self._trainee_of(drawn_by))
        if dropped is Drop.STALE and loop is not None:
            lineage = loop.trainee.lineage
            return (
                f"{drawn_by} is {lineage.lag(drawn_by)} versions behind {lineage.tip}, and max_staleness is "
                f"{settings.max_staleness}"
            )
        return f"{drawn_by} is no version that training continues from"

    def lost(self, adapter: AdapterRef, trajectories: int) -> None:
        """See `collecting.Sink`."""
        self._buffer.lost(self._trainee_of(adapter), trajectories)
        self._hub.emit("dropped", adapter=self._trainee_of(adapter), reasons={Drop.ABORTED.value: trajectories})

    def feedback(self, trajectory_id: str, score: float) -> None:
        """See `core.TrainingClient.feedback`."""
        self._intake.feedback(trajectory_id, score)

    def trajectories(self, limit: int) -> tuple[TrajectoryCard, ...]:
        """See `core.TrainingClient.trajectories`."""
        return self._buffer.cards(limit)

    def _trainee_of(self, adapter: AdapterRef) -> str:
        return self._default if adapter == BASE_ADAPTER else adapter.name

    def _wake(self, trainee: str) -> None:
        if (loop := self._loops.get(trainee)) is not None:
            loop.wake()

    def _ended(self, group: Group) -> None:
        """A group's fate is known."""
        if dropped := group.in_state(State.DROPPED):
            reasons: dict[str, int] = {}
            for member in dropped:
                reasons[str(member.reason)] = reasons.get(str(member.reason), 0) + 1
            self._hub.emit("dropped", adapter=group.trainee, group_id=group.group_id, reasons=reasons)
        if self._parts.spill is not None:
            self._parts.spill.append(group)

    # -- updates ---------------------------------------------------------------------------------

    async def update(
        self,
        adapter: str | None = None,
        given: Sequence[GivenTrajectory] | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
        progress: Mapping[str, float] | None = None,
    ) -> UpdateReport:
        """See `core.TrainingClient.update`. `progress`: see `Trainee.progress`."""
        loop = self._loop(adapter)
        tag = None if checkpoint_name is None else check_tag(checkpoint_name)
        return await self._seen_through(loop.update(given, publish, tag, progress))

    def progress(self, adapter: str | None = None) -> Mapping[str, float]:
        """See `Trainee.progress`."""
        return self._loop(adapter).trainee.progress

    def status(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.status`."""
        if adapter is None and self._default not in self._loops:
            return TrainingStatus(enabled=True, state="idle", adapter=self._default, trained=tuple(self._loops))
        status = self._loop(adapter).status()
        spill = self._parts.spill
        return replace(
            status,
            checkpoints=tuple(card.name for card in self._parts.publisher.checkpoints(status.adapter)),
            trained=tuple(self._loops),
            detail={**status.detail, "trajectory_log_failures": spill.failures if spill else 0},
        )

    async def start(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.start`."""
        name = self._default if adapter is None else adapter
        await self._seen_through(self.start_adapter(name))
        return self.status(name)

    async def pause(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.pause`."""
        self._loop(adapter).pause()
        return self.status(adapter)

    async def resume(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.resume`."""
        self._loop(adapter).resume()
        return self.status(adapter)

    async def rollback(self, adapter: str | None = None, to: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.rollback`."""
        await self._seen_through(self._loop(adapter).roll_back(to))
        return self.status(adapter)

    def trains(self, selector: str | None) -> bool:
        """See `core.TrainingClient.trains`."""
        loop = self._loops.get(self._default if selector is None else selector)
        return loop is not None and loop.trainee.live in (None, loop.trainee.lineage.tip)

    async def save(
        self, adapter: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.TrainingClient.save`."""
        tags = [check_tag(tag) for tag in tags]
        return await self._seen_through(self._loop(adapter).save(step, tags, metrics))

    def events(self) -> Listener:
        """See `core.TrainingClient.events`."""
        return self._hub.listen()

    def _loop(self, adapter: str | None) -> TrainingLoop:
        name = self._default if adapter is None else adapter
        if name not in self._loops:
            raise UnknownModelError(
                f"{name!r} is not trained here; begin with POST /v1/training/start.", param="lora_adapter"
            )
        return self._loops[name]

    # -- tasks -----------------------------------------------------------------------------------

    async def _seen_through(self, change: Coroutine[Any, Any, T]) -> T:
        """Half a change is none: it is finished though whoever asked for it is cancelled."""
        return await asyncio.shield(self._spawn(change))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a change of training failed: %s", error)  # whoever asked for it is told

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        self._buffer.check_integrity()
