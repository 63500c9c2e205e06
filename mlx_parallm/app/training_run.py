"""TrainingRun: the steps of `mlx_parallm_train`.

Each step fills the buffer with groups that have their rewards, and makes one update.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_parallm.app.build import Served
from mlx_parallm.app.train_progress import SampleText, TrainOptions, TrainView, run_facts
from mlx_parallm.config import Action, Config
from mlx_parallm.errors import EngineDeadError, TrainingFailedError
from mlx_parallm.rl.runs.record import RUN_STEPS, RUN_TASKS
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.rl.tracking import Record, Tracking
from mlx_parallm.rl.updates.run import UNTAUGHT_S
from mlx_parallm.rl.updates.selection import Chosen

if TYPE_CHECKING:  # it needs the extra `cluster`
    from mlx_parallm.extras.cluster.running.training import ClusterTraining

_POLL_S = 0.5

FINAL = "final"
"""Tag of the checkpoint that a run ends with."""

STEPS, TASKS = RUN_STEPS, RUN_TASKS
"""Keys of an update's progress: the steps made so far, and the tasks taken from the environment for them."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What a step has for its update.

    Attributes:
        speed: figures of how fast it came.
        failures: for people, one line each.
        levels: figures of the curriculum's levels.
        chosen: the groups of this step, by their ids; None: all that wait.
        tasks: taken from the environment for this step and those before it.
        state: what `TrainingRun._open` needs besides, to choose the same tasks in a resumed run.
    """

    speed: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    levels: Mapping[str, float] = field(default_factory=dict)
    chosen: Chosen | None = None
    tasks: int = 0
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass
class TrainingRun(ABC):
    """The steps of one run. `drawn` of `wanted` trajectories of the current step were reported to the view.

    `cluster`: the cluster that this run is the trainer of; None: it publishes to nobody.
    `restores`: whether what waited in the journal when the process ended waits for an update again.
    """

    restores: ClassVar[bool] = False

    config: Config
    options: TrainOptions
    view: TrainView
    served: Served
    service: TrainingService
    tracking: Tracking
    cluster: ClusterTraining | None = None
    drawn: int = field(default=0, init=False)
    wanted: int = field(default=0, init=False)

    # -- where the groups come from --------------------------------------------------------------

    @abstractmethod
    async def _open(self, done: int, taken: int) -> None:
        """Gets ready. `done`: steps, and `taken`: tasks, that were made before the run was resumed."""

    async def _warm_up(self) -> None:  # noqa: B027 - most runs begin with the first step
        """Called before the first step of a run."""

    @abstractmethod
    async def _fill(self, is_last: bool) -> Filled:
        """Returns when the groups of one update wait with their rewards. `is_last`: of the last update."""

    def _check_run(self) -> None:  # noqa: B027 - most runs need no check
        """Called after each step. Raises TrainingFailedError: the run cannot go on."""

    async def _close(self) -> None:  # noqa: B027 - most runs have nothing to end
        """Ends what `_open` began, before training ends."""

    async def _ended(self) -> None:  # noqa: B027 - most runs have nobody to tell
        """Called when the last updates are saved."""

    # -- steps -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Makes the steps that are left. The checkpoint of the last one is tagged."""
        options = self.options
        try:
            await self.service.start_adapter(self.service.default_adapter, self.restores)
            await self.service.pause()  # each step makes its own update when its trajectories are scored
            if self.cluster is not None:
                await self.cluster.begin()
            done, taken = self._progress()
            await self._open(done, taken)
            assert self.served.run is not None  # what trains keeps checkpoints
            self.view.started(run_facts(self.config, options, self.served), done, self.served.run.path)
            if not done:
                await self._warm_up()
            if done < options.steps and (result := await self.service.evaluate_if_due()) is not None:
                self.view.evaluated(result)
                fields = {"adapter": result.adapter.name, "version": result.adapter.version}
                self.tracking.write(Record("evaluation", done, result.metrics, fields, result.at))
            for step in range(done + 1, options.steps + 1):
                await self._step(step)
                self._check_run()
        finally:
            try:
                await self._close()
            finally:
                await self.service.close()
                await self._ended()

    def _progress(self) -> tuple[int, int]:
        """The steps made and the tasks taken before the run was resumed."""
        progress = self.service.loop().training.progress
        return int(progress.get(STEPS, 0)), int(progress.get(TASKS, 0))

    async def _step(self, step: int) -> None:
        """Makes one update, and reports it with the speed of the whole step."""
        await self._until_allowed()
        started, self.drawn, self.wanted = time.monotonic(), 0, 0
        filled = await self._fill(is_last=step == self.options.steps)
        self._show_samples(filled.chosen)
        progress = {STEPS: step, TASKS: filled.tasks, **filled.state}
        report = await self._updated(progress, filled.chosen)
        if self.cluster is not None:
            await self.cluster.publish_live()
        speed = {**filled.speed, "seconds": time.monotonic() - started, "failed_tasks": float(len(filled.failures))}
        report = replace(report, metrics={**report.metrics, **speed, **filled.levels})
        if step == self.options.steps and report.step:
            report = await self._save_tagged(await self._evaluated(report))
        self.view.updated(report)
        self.tracking.write(Record("update", step, report.metrics, _fields(report, filled.failures)))
        _check_not_paused(report)

    async def _updated(self, progress: Mapping[str, float], chosen: Chosen | None) -> UpdateReport:
        """Makes the update of a step. It is made again while the teacher scores none of its samples.

        Raises:
            TrainingFailedError: that happened `max_skips` times.
        """
        for _ in range(self.config.rl_training.max_skips):
            report = await self.service.update(progress=progress, chosen=chosen)
            if not report.given_back:
                return report
            await asyncio.sleep(UNTAUGHT_S)
        raise TrainingFailedError(
            f"nothing can be learnt: {report.reason}; what was learnt before is saved. Continue with --resume when the "
            "teacher answers"
        )

    async def _until_allowed(self) -> None:
        """Returns when the machine may train. Until then, the log says why it should not."""
        while self.served.engine.stats().machine.training_waits_for:
            self._check_alive()
            await asyncio.sleep(_POLL_S)

    def _show_samples(self, chosen: Chosen | None) -> None:
        """Shows the best and the worst sample of this step to the view."""
        limit = self.drawn if chosen is None else self.config.rl_training.trajectory_buffer_size
        newest = self.service.trajectories.buffer.newest(limit)
        samples = [
            SampleText.of(trajectory, member.reward)
            for trajectory, member in newest
            if member.reward is not None and (chosen is None or chosen(trajectory.group_id))
        ]
        samples.sort(key=attrgetter("reward"))
        if samples:
            self.view.sampled(samples[-1], samples[0])

    async def _evaluated(self, report: UpdateReport) -> UpdateReport:
        """Evaluates the version that the run ends with, unless it was evaluated before."""
        result = await self.service.evaluate_if_due(early=True)
        return report if result is None else replace(report, metrics={**report.metrics, **result.metrics})

    async def _save_tagged(self, report: UpdateReport) -> UpdateReport:
        card = await self.service.save(None, None, [FINAL], report.metrics)
        return replace(report, checkpoint=card.name)

    def _check_alive(self) -> None:
        """Raises EngineDeadError: the device thread has stopped."""
        if not self.served.engine.stats().alive:
            raise EngineDeadError("the device thread has stopped")

    def _report_rollout(self, ended: int) -> None:
        self.drawn += ended
        self.view.rollout(self.drawn, self.wanted)


def _check_not_paused(report: UpdateReport) -> None:
    """Ends the run where a server would pause. Raises TrainingFailedError: training pauses for what has diverged."""
    for found in report.divergences:
        if found.action == Action.PAUSE:
            raise TrainingFailedError(
                f"training has diverged: {found.reason}; what was learnt before is saved. Change the settings and "
                f"continue with --resume, or set another rl_training.divergence.{found.signal}.action"
            )


def _fields(report: UpdateReport, failures: tuple[str, ...]) -> Mapping[str, Any]:
    """What the log has of a step besides its metrics."""
    adapter = report.adapter
    return {
        "optimizer_step": report.step,
        "status": report.status,
        "reason": report.reason,
        "divergences": [found.signal for found in report.divergences],
        "adapter": adapter.name if adapter else None,
        "version": adapter.version if adapter else None,
        "checkpoint": report.checkpoint,
        "failures": list(failures),
    }
