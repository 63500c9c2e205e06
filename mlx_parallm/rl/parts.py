"""What training is made of: the parts that the application builds, the hooks of extras, and the changes under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.config import CheckpointingConfig, ResolvedTraining
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.checkpoints import PolicyCheckpoints, PolicyOf
from mlx_parallm.rl.environments.files import FileTasks
from mlx_parallm.rl.environments.protocol import Task
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.evaluation import Evaluator
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.trajectories import TrajectoryGroup
from mlx_parallm.rl.trajectory_log import TrajectoryLog
from mlx_parallm.tasks import log_failure, spawn
from mlx_parallm.train.learner import Learner


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What training is made of.

    `evaluator`: asks versions the held-out tasks. `policy_of`: gives the policy that training starts from
    if the live version has no checkpoint of a trainer. `log`: gets every trajectory in the end. `tasks`: have the
    answers that requests leave out. `journal`: of the run; it is closed with the service. `teacher`: what distillation
    imitates. `environment_thread`: where all rollouts of environments run. `held_out`: the tasks of evaluations, which
    are not to be trained on. `reward_key`: see `configured_reward.reward_key`.
    """

    learner: Learner
    adapters: AdapterService
    checkpoints: PolicyCheckpoints
    scorers: ScoringService
    config: ResolvedTraining
    checkpointing: CheckpointingConfig
    evaluator: Evaluator | None = None
    policy_of: PolicyOf | None = None
    log: TrajectoryLog | None = None
    tasks: FileTasks = field(default_factory=FileTasks)
    journal: Journal = field(default_factory=Journal)
    teacher: Teacher | None = None
    environment_thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    held_out: tuple[Task, ...] = ()
    reward_key: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingHooks:
    """Functions that extras have added. They are called on the event loop's thread, in the order in which they were
    added. `str` is the name of an adapter.

    Attributes:
        started: a server has begun to train.
        ending: training is about to end; what it needs still works.
        too_late: opinions that the last process acknowledged, of answers that waited and are too old by now.
        begun: the training of an adapter begins or goes on, from its live version.
        before_change: an adapter is about to be updated, rolled back or stopped. Raises ConflictError: it must not be.
        forgotten: what is known of an adapter is removed; it is not in training.
        closed: training ends.
        wants: whether the answers of a version are collected however old it is.
        sampled: the answers to one prompt have come.
        scored: a group has become complete.
        dropped: these trajectories will not be trained on.
        ended: all members of a group are trained or dropped.
        check_integrity: raises AssertionError.
    """

    started: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    ending: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    too_late: list[Callable[[Sequence[Feedback]], Awaitable[None]]] = field(default_factory=list)
    begun: list[Callable[[str], None]] = field(default_factory=list)
    before_change: list[Callable[[str], None]] = field(default_factory=list)
    forgotten: list[Callable[[str], None]] = field(default_factory=list)
    closed: list[Callable[[], None]] = field(default_factory=list)
    wants: list[Callable[[AdapterRef], bool]] = field(default_factory=list)
    sampled: list[Callable[[Sequence[Trajectory]], None]] = field(default_factory=list)
    scored: list[Callable[[TrajectoryGroup], None]] = field(default_factory=list)
    dropped: list[Callable[[Sequence[Trajectory]], None]] = field(default_factory=list)
    ended: list[Callable[[TrajectoryGroup], None]] = field(default_factory=list)
    check_integrity: list[Callable[[], None]] = field(default_factory=list)


T = TypeVar("T")

_WHAT = "a change of training"

_log = logging.getLogger(__name__)


class Changes:
    """The changes under way. A change that has begun is finished even if its caller is cancelled; only `cancel` ends
    it. Event loop's thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finished(self, change: Coroutine[Any, Any, T]) -> T:
        """Waits for a change, and raises what it raises."""
        task = self._keep(asyncio.create_task(change))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            log_failure(task, _log, _WHAT)  # nobody else gets its error now
            raise

    def spawn(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Begins a change that nobody waits for. `context`: of its task; None: the caller's."""
        return self._keep(spawn(work, _log, _WHAT, context))

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Gives up all changes, and returns when they have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
