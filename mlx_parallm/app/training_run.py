"""TrainingRun: the steps of `mlx_parallm_train`. Each fills the buffer with groups that have their rewards, and makes
one update.

TrainOptions    what a run is asked for, besides its configuration
TrainView       is shown its progress
EnvironmentRun  the run on the tasks of an environment, which the adapter answers
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mlx_parallm.app.banner import checkpoints_text
from mlx_parallm.app.build import Served, inference_engine, metrics_file
from mlx_parallm.config import Action, Config
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import EngineDeadError, TrainingFailedError
from mlx_parallm.rl.environments import Environment
from mlx_parallm.rl.rollouts.environment import EnvironmentRollouts
from mlx_parallm.rl.rollouts.steps import Batch, StepRollouts, figures_of
from mlx_parallm.rl.rollouts.tasks import warm_up_batches
from mlx_parallm.rl.runs.record import RUN_STEPS, RUN_TASKS
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import EvaluationResult, UpdateReport
from mlx_parallm.rl.tracking import Record, Tracking
from mlx_parallm.rl.updates.run import UNTAUGHT_S
from mlx_parallm.rl.updates.selection import REFILLS, Chosen
from mlx_parallm.train.jobs import RATE_ENDS

if TYPE_CHECKING:  # it needs the extra `cluster`
    from mlx_parallm.extras.cluster.running.training import ClusterTraining

_log = logging.getLogger(__name__)

# ---- what a run is asked for, and what it shows -------------------------------------------------------

ENDLESS = 10**9
"""Steps of what trains until it is stopped."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a run does, besides its configuration.

    Each of `steps` takes `prompts_per_step` groups of `group_size` trajectories from `environment` and makes one update
    from them. In a resumed run, the steps that were made before count too. With Atropos, `environment` is a name for
    people.
    `log` is the JSONL file of their figures; None: metrics.jsonl in the run's folder. `warm_up`: so many examples of
    the environment are imitated before the first step.
    """

    environment: str
    steps: int
    group_size: int
    prompts_per_step: int
    log: Path | None = None
    warm_up: int = 0


@dataclass(frozen=True, slots=True)
class SampleText:
    """One answer of a step: the last message of its prompt, its own text, and its reward."""

    prompt: str
    text: str
    reward: float

    @classmethod
    def of(cls, trajectory: Trajectory, reward: float) -> SampleText:
        messages = trajectory.collection.messages
        prompt = str(messages[-1].get("content", "")) if messages else ""
        return cls(prompt, trajectory.text, reward)


class TrainView(Protocol):
    """Receives the progress of a run, all from one thread. No method raises or blocks."""

    def started(self, facts: Mapping[str, str], steps_done: int, folder: Path) -> None:
        """The model is loaded and nothing is sampled yet.

        Args:
            facts: short names and their texts, in order.
            steps_done: steps that the run made before it was resumed.
            folder: of the run.
        """

    def evaluated(self, result: EvaluationResult) -> None:
        """The version that the run starts from was evaluated. Later evaluations are in the metrics of reports."""

    def rollout(self, done: int, wanted: int) -> None:
        """In the current step, `done` of `wanted` trajectories are sampled."""

    def task_failed(self, reason: str) -> None:
        """A task of the current step could not be answered, or its answers could not be scored."""

    def sampled(self, best: SampleText, worst: SampleText) -> None:
        """The samples of the current step with the highest and with the lowest reward."""

    def updated(self, report: UpdateReport) -> None:
        """A step has ended, with or without a published version.

        Its metrics include seconds (of the whole step) and, if its answers were sampled here, tokens_per_second.
        """


def run_facts(config: Config, options: TrainOptions, served: Served) -> Mapping[str, str]:
    """Short names and texts of what the run trains, on what, and where it writes."""
    training, model = config.rl_training, config.model
    return {
        "model": f"{served.card.name}, {served.card.parameters / 1e6:,.0f}M parameters",
        "environment": options.environment,
        **({"reward": training.reward} if training.reward else {}),
        "adapter": f"{config.adapters.default_adapter}, rank {model.lora_rank}, alpha {model.lora_alpha:g}, "
        f"{', '.join(model.lora_target_modules)}",
        "update": f"{training.algorithm}, {options.prompts_per_step} prompts x {options.group_size} samples, "
        f"learning rate {training.optimizer.learning_rate:g}",
        **_inference_facts(config),
        **_evaluation_facts(config, len(served.training.parts.held_out) if served.training else 0),
        "checkpoints": checkpoints_text(served.run),
        **({"log": str(metrics_file(served.run, options.log))} if served.run else {}),
    }


def _inference_facts(config: Config) -> Mapping[str, str]:
    settings = config.inference
    return {"samples": f"from {settings.engine} at {settings.url}"} if settings.engine.outside else {}


def _evaluation_facts(config: Config, tasks: int) -> Mapping[str, str]:
    evaluation = config.rl_training.evaluation
    if evaluation.every is None:
        return {}
    return {"evaluation": f"{tasks} held-out tasks x {evaluation.samples}, every {evaluation.every} updates"}


# ---- the steps of any run -----------------------------------------------------------------------------

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
    """The steps of one run. `sampled` of `wanted` trajectories of the current step were reported to the view.

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
    sampled: int = field(default=0, init=False)
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

    def facts(self) -> Mapping[str, str]:
        """Short names and texts of what the run does, in order."""
        return run_facts(self.config, self.options, self.served)

    # -- steps -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Makes the steps that are left. The checkpoint of the last one is tagged."""
        try:
            await self.service.start_adapter(self.service.default_adapter, self.restores)
            await self.service.pause()  # each step makes its own update when its trajectories are scored
            if self.cluster is not None:
                await self.cluster.begin()
            done, taken = self._progress()
            await self._open(done, taken)
            assert self.served.run is not None  # what trains keeps checkpoints
            self.view.started(self.facts(), done, self.served.run.path)
            training = self.config.rl_training
            optimizer, steps = training.optimizer, self.options.steps * training.minibatches
            if optimizer.last_step is not None and steps > optimizer.last_step:
                _log.warning(RATE_ENDS, optimizer.schedule.value, optimizer.last_step)
            if not done:
                await self._warm_up()
            if done < self.options.steps and (result := await self.service.evaluate_if_due()) is not None:
                self.view.evaluated(result)
                fields = {"adapter": result.adapter.name, "version": result.adapter.version}
                self.tracking.write(Record("evaluation", done, result.metrics, fields, result.at))
            while done < self.options.steps:  # a run may end early
                done += 1
                await self._step(done)
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
        started, self.sampled, self.wanted = time.monotonic(), 0, 0
        filled = await self._fill(is_last=step == self.options.steps)
        self.service.parts.journal.check()  # otherwise a full disk would let the run end with nothing learnt
        self._show_samples(filled.chosen)
        progress = {STEPS: step, TASKS: filled.tasks, **filled.state}
        report = await self._updated(progress, filled.chosen)
        if self.cluster is not None:
            await self.cluster.publish_live()
        speed = {**filled.speed, "seconds": time.monotonic() - started, "failed_tasks": float(len(filled.failures))}
        report = replace(report, metrics={**report.metrics, **speed, **filled.levels})
        if step == self.options.steps and (report.step or self.config.adapters.init_from is not None):
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
        limit = self.sampled if chosen is None else self.config.rl_training.trajectory_buffer_size
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
        self.sampled += ended
        self.view.rollout(self.sampled, self.wanted)


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


# ---- the run on an environment ---------------------------------------------------------------------

WARM_UP = "warm_up_updates"
"""Key of an update's progress: the updates of the warm-up so far."""

_UNSCORED = "a task's answers could not be scored"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


@dataclass(kw_only=True)
class EnvironmentRun(TrainingRun):
    """Each step samples groups of answers to some tasks of `source`, and waits for their rewards; see `StepRollouts`.
    Tasks that were answered for no update when the process ended are answered again.
    """

    source: Environment

    def __post_init__(self) -> None:
        window = max(self.options.prompts_per_step, _MIN_WINDOW)
        self.failures = deque[str](maxlen=window)  # "" for a task that succeeded
        options, config = self.options, self.config
        assert self.served.run is not None  # what trains keeps checkpoints
        self.rollouts = EnvironmentRollouts(
            config,
            self.service,
            self.served.tokenizer,
            self.served.run.id,
            self.source,
            options.group_size,
            lambda number, count: self.step_rollouts.answered(number, count),
        )
        self.step_rollouts = StepRollouts(
            self.rollouts,
            self.service,
            config.rl_training,
            options.prompts_per_step,
            options.group_size,
            self._check_alive,
            self._report_rollout,
        )

    async def _open(self, done: int, taken: int) -> None:
        """Raises ConfigError: the engine cannot sample what training needs."""
        await self.rollouts.open(taken, self.service.loop().training.progress)
        self.step_rollouts.open(taken)
        if done < self.options.steps:
            cluster = None if self.cluster is None else self.cluster.engine
            await self.rollouts.open_inference(inference_engine(self.config, self.served, cluster))

    async def _warm_up(self) -> None:
        """Makes the updates of the warm-up that an earlier process has not made.

        Raises:
            ConfigError: the environment has no examples that can be trained on.
            TrainingFailedError: an update changed nothing.
        """
        if not self.options.warm_up:
            return
        seed, tokenizer = self.config.rl_training.seed, self.served.tokenizer
        batches = warm_up_batches(self.source, self.options.warm_up, seed, tokenizer)
        made = int(self.service.loop().training.progress.get(WARM_UP, 0))
        for number, batch in enumerate(batches[made:], made + 1):
            progress = {STEPS: 0, TASKS: 0, WARM_UP: number}
            report = await self.service.update(given=batch, signal=Signal.CORRECTIONS, progress=progress)
            if report.status != "published":
                raise TrainingFailedError(f"update {number} of the warm-up was {report.status}: {report.reason}")
            _log.info("update %d of %d of the warm-up is made", number, len(batches))

    async def _close(self) -> None:
        await self.step_rollouts.close()
        await self.rollouts.close()

    async def _fill(self, is_last: bool) -> Filled:
        tokens, sampling_s, failures = 0, 0.0, list[str]()
        self.step_rollouts.begin_step(is_last)
        for _ in range(1 + self._refills):
            missing = self.options.prompts_per_step - len(self.step_rollouts.ready)
            if missing > 0:
                batch = await self._next_batch(missing)
                sampled = await self.step_rollouts.finish(batch)
                failed = [*sampled.failures, *[self._why_unscored] * self.step_rollouts.unscored(batch)]
                self._count(batch.end - batch.first, failed)
                for fault in sampled.faults:
                    self.view.task_failed(fault)
                failures += failed
                tokens, sampling_s = tokens + sampled.tokens, sampling_s + batch.seconds
        tasks = self.step_rollouts.end_step()
        state = self.rollouts.settle(tasks.stop)
        speed = {"tokens_per_second": tokens / sampling_s if sampling_s else 0.0}
        return Filled(
            speed, tuple(failures), figures_of(self.rollouts.levels), partial(self._is_of, tasks), tasks.stop, state
        )

    async def _next_batch(self, groups: int) -> Batch:
        batch = await self.step_rollouts.next_batch(groups)
        self.wanted += (batch.end - batch.first) * self.options.group_size
        self._report_rollout(batch.sampled)
        return batch

    def _is_of(self, tasks: range, group_id: str) -> bool:
        return self.rollouts.number_of(group_id) in tasks

    def _count(self, tasks: int, failures: list[str]) -> None:
        """Reports the tasks that failed."""
        for failure in failures:
            self.view.task_failed(failure)
        self.failures.extend([""] * (tasks - len(failures)) + failures)

    def _check_run(self) -> None:
        failed = [failure for failure in self.failures if failure]
        if len(self.failures) == self.failures.maxlen and 2 * len(failed) > len(self.failures):
            raise TrainingFailedError(
                f"{len(failed)} of the last {len(self.failures)} tasks failed, the last of them with: {failed[-1]}; "
                "repair the environment and continue with --resume"
            )

    @property
    def _why_unscored(self) -> str:
        return f"{_UNSCORED}: {self.service.parts.scorers.last_fault or 'it took too long'}"

    @property
    def _refills(self) -> int:
        """How many times groups without a learning signal are replaced: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self.config.rl_training.algorithm == "dapo" else 0
