"""`mlx_parallm_train`: trains an adapter on the tasks of an environment, without clients and without HTTP.

Each step draws groups of answers to some tasks, waits for their rewards, and makes one update.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mlx_parallm.app.banner import checkpoints_text
from mlx_parallm.app.build import Engine, Served
from mlx_parallm.app.tracking import metrics_file, start_tracking
from mlx_parallm.app.training import TrainingRuntime, reward_of
from mlx_parallm.config import Config
from mlx_parallm.core import BASE_ADAPTER, EvaluationResult, TrajectoryCard, UpdateReport
from mlx_parallm.errors import ConfigError, EngineDeadError, InvalidRequestError, TrainingFailedError
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.environments import Environment, Task, environment, read_system_prompt
from mlx_parallm.rl.held_out import without
from mlx_parallm.rl.rollouts import DrawResult, Rollouts, RolloutSettings
from mlx_parallm.rl.runs.listing import RUN_STEPS
from mlx_parallm.rl.runs.record import RunState
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue
from mlx_parallm.rl.selection import REFILLS
from mlx_parallm.rl.tracking.tracking import Record, Tracking

FINAL = "final"
"""Tag of the checkpoint that a run ends with."""

STEPS, TASKS = RUN_STEPS, "run_tasks"
"""Keys of an update's progress: the steps made so far, and the tasks taken from the environment for them."""

_POLL_S = 0.05
_UNSCORED = "a task's answers could not be scored"
_SHOW_CURSOR = b"\x1b[?25h"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a run does, besides its configuration.

    Each of `steps` draws `prompts_per_step` groups of `group_size` trajectories from `environment` and makes one update
    from them. In a resumed run, the steps that were made before count too.
    `log` is the JSONL file of their figures; None: metrics.jsonl in the run's folder.
    """

    environment: str
    steps: int
    group_size: int
    prompts_per_step: int
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class SampleText:
    """One answer of a step: the last message of its prompt, its own text, and its reward."""

    prompt: str
    text: str
    reward: float


class TrainView(Protocol):
    """Receives the progress of a run, all from one thread. No method raises or blocks."""

    def started(self, facts: Mapping[str, str], steps_done: int) -> None:
        """The model is loaded and nothing is drawn yet.

        Args:
            facts: short names and their texts, in order.
            steps_done: steps that the run made before it was resumed.
        """
        ...

    def evaluated(self, result: EvaluationResult) -> None:
        """The version that the run starts from was evaluated. Later evaluations are in the metrics of reports."""
        ...

    def rollout(self, done: int, wanted: int) -> None:
        """In the current step, `done` of `wanted` trajectories are drawn."""
        ...

    def task_failed(self, reason: str) -> None:
        """A task of the current step could not be answered, or its answers could not be scored."""
        ...

    def sampled(self, best: SampleText, worst: SampleText) -> None:
        """The samples of the current step with the highest and with the lowest reward."""
        ...

    def updated(self, report: UpdateReport) -> None:
        """A step has ended, with or without a published version.

        Its metrics include tokens_per_second (drawn in this step) and seconds (of the whole step).
        """
        ...


def run(config: Config, options: TrainOptions, view: TrainView) -> int:
    """Makes the updates that are left of `options.steps`.

    The updates are saved however the run ends, unless a second signal ends the process at once.

    Returns:
        The process's exit code: 0, or 128 plus the signal's number if SIGINT or SIGTERM stopped it.

    Raises:
        ConfigError, ModelError: before anything is drawn.
        TrainingFailedError: most tasks failed.
        StorageError: the last updates could not be saved.
        EngineError: the device thread ended, or could not draw.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    rewarded = config.rl_training.reward is not None
    source = environment(options.environment, rewarded)  # what cannot be used is refused before the model is loaded
    read_system_prompt(config.rl_training.system_prompt)
    engine = Engine(config, {name: value for name, value in asdict(options).items() if name != "log"})
    served = engine.start()
    assert served.training is not None  # the command's configuration trains
    assert served.run is not None
    tracking = start_tracking(config, served.run, options.log)
    try:
        steps = _TrainingRun(config, options, source, view, served, served.training, tracking)
        with engine.failures_recorded():
            exit_code = asyncio.run(_until_signal(steps.run()))
        if exit_code:
            engine.ends(RunState.INTERRUPTED, f"it was stopped by {signal.Signals(exit_code - 128).name}")
        return exit_code
    finally:
        try:
            tracking.close()
        finally:  # an interrupt too
            engine.stop()


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs `work` and returns the exit code. SIGINT and SIGTERM cancel it. Main thread only."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            _exit_now(128 + number)
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return 128 + received[0] if received else 0


def _exit_now(code: int) -> NoReturn:
    """Ends the process at once. Checkpoints are written whole or not at all, so nothing is left half-written."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    os._exit(code)


@dataclass
class _TrainingRun:
    """The steps of one run. `drawn` of `wanted` trajectories of the current step were reported to the view."""

    config: Config
    options: TrainOptions
    source: Environment
    view: TrainView
    served: Served
    training: TrainingRuntime
    tracking: Tracking
    drawn: int = 0
    wanted: int = 0

    def __post_init__(self) -> None:
        self.service = self.training.service
        window = max(self.options.prompts_per_step, _MIN_WINDOW)
        self.failures = deque[str](maxlen=window)  # "" for a task that succeeded

    async def run(self) -> None:
        """Makes the steps that are left. The checkpoint of the last one is tagged."""
        options = self.options
        try:
            await self.training.start(restore=False)  # tasks that were answered for no update are answered again
            await self.service.pause()  # each step makes its own update when its trajectories are scored
            done, taken = self._progress()
            rollouts = self._rollouts(await asyncio.to_thread(self._tasks, taken), taken)
            self.view.started(_facts(self.config, options, self.served), done)
            if done < options.steps and (result := await self.service.evaluate_if_due()) is not None:
                self.view.evaluated(result)
                fields = {"adapter": result.adapter.name, "version": result.adapter.version}
                self.tracking.write(Record("evaluation", done, result.metrics, fields, result.at))
            for step in range(done + 1, options.steps + 1):
                await self._step(rollouts, step)
                self._check_failures()
        finally:
            await self.training.close()

    def _progress(self) -> tuple[int, int]:
        """The steps made and the tasks taken before the run was resumed."""
        progress = self.service.progress()
        return int(progress.get(STEPS, 0)), int(progress.get(TASKS, 0))

    def _tasks(self, taken: int) -> Iterator[Task]:
        """The environment's tasks after the first `taken`. Raises ConfigError: they cannot be scored."""
        tasks = without(self.source.tasks(self.config.rl_training.seed), self.training.held_out)
        first = next(tasks)
        try:
            ScorerCatalogue(reward_of(self.config)).check(first.collection)
        except InvalidRequestError as error:
            raise ConfigError(f"environment: {error}") from error
        return itertools.islice(itertools.chain([first], tasks), taken, None)

    def _rollouts(self, tasks: Iterator[Task], taken: int) -> Rollouts:
        training, served = self.config.rl_training, self.served
        assert served.run is not None  # the command's configuration keeps checkpoints
        settings = RolloutSettings(
            self.options.group_size,
            training.max_completion_tokens,
            training.rollout_temperature,
            read_system_prompt(training.system_prompt),
            seed=training.seed,
            run=served.run.id,
            taken=taken,
        )
        return Rollouts(served.generate, served.adapters, served.tokenizer, tasks, settings, self._report_rollout)

    async def _step(self, rollouts: Rollouts, step: int) -> None:
        """Makes one update, and reports it with the speed of the whole step."""
        started, self.drawn, self.wanted = time.monotonic(), 0, 0
        tokens, drawing, failures = 0, 0.0, list[str]()
        for _ in range(1 + self._refills):
            if missing := self.options.prompts_per_step - self.service.status().groups_ready:
                began = time.monotonic()
                drawn, unscored = await self._draw(rollouts, missing), self._unscored()
                drawing += time.monotonic() - began
                await self._wait_for_rewards()
                failed = [*drawn.failures, *[self._why_unscored] * (self._unscored() - unscored)]
                self._count(missing, failed)
                failures += failed
                tokens += drawn.tokens
        self._show_samples()
        report = await self.service.update(progress={STEPS: step, TASKS: rollouts.taken})
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0, "seconds": time.monotonic() - started}
        report = replace(report, metrics={**report.metrics, **speed, "failed_tasks": float(len(failures))})
        if step == self.options.steps and report.step:
            report = await self._save_tagged(await self._evaluated(report))
        self.view.updated(report)
        self.tracking.write(Record("update", step, report.metrics, _fields(report, failures)))

    def _show_samples(self) -> None:
        """Shows the best and the worst sample of this step to the view."""
        cards = self.service.trajectories(self.drawn)
        scored = sorted((card.reward, number, card) for number, card in enumerate(cards) if card.reward is not None)
        if scored:
            self.view.sampled(_text_of(scored[-1][2]), _text_of(scored[0][2]))

    async def _evaluated(self, report: UpdateReport) -> UpdateReport:
        """Evaluates the version that the run ends with, unless it was evaluated before."""
        result = await self.service.evaluate_if_due(early=True)
        return report if result is None else replace(report, metrics={**report.metrics, **result.metrics})

    async def _save_tagged(self, report: UpdateReport) -> UpdateReport:
        card = await self.service.save(None, None, [FINAL], report.metrics)
        return replace(report, checkpoint=card.name)

    def _count(self, tasks: int, failures: list[str]) -> None:
        """Reports the tasks that failed."""
        for failure in failures:
            self.view.task_failed(failure)
        self.failures.extend([""] * (tasks - len(failures)) + failures)

    def _check_failures(self) -> None:
        """Raises TrainingFailedError: most of the last tasks failed."""
        failed = [failure for failure in self.failures if failure]
        if len(self.failures) == self.failures.maxlen and 2 * len(failed) > len(self.failures):
            raise TrainingFailedError(
                f"{len(failed)} of the last {len(self.failures)} tasks failed, the last of them with: {failed[-1]}; "
                "repair the environment and continue with --resume"
            )

    def _unscored(self) -> int:
        """Tasks whose answers could not be scored so far."""
        return self.service.status().drops.get(DropReason.SCORING_FAILED.value, 0) // self.options.group_size

    @property
    def _why_unscored(self) -> str:
        return f"{_UNSCORED}: {self.training.scorers.last_fault or 'it took too long'}"

    @property
    def _refills(self) -> int:
        """How many times groups without a learning signal are replaced: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self.config.rl_training.algorithm == "dapo" else 0

    async def _draw(self, rollouts: Rollouts, groups: int) -> DrawResult:
        """Draws groups from the live version."""
        self.wanted += groups * self.options.group_size
        self._report_rollout(0)
        return await rollouts.draw(groups, str(self.service.status().current or BASE_ADAPTER.name))

    async def _wait_for_rewards(self) -> None:
        """Returns when every trajectory has its reward.

        Raises:
            EngineDeadError: the device thread has stopped.
        """
        while self.service.status().trajectories_waiting:
            if not self.served.engine.stats().alive:
                raise EngineDeadError("the device thread has stopped")
            await asyncio.sleep(_POLL_S)

    def _report_rollout(self, ended: int) -> None:
        self.drawn += ended
        self.view.rollout(self.drawn, self.wanted)


def _text_of(card: TrajectoryCard) -> SampleText:
    trajectory = card.trajectory
    messages = trajectory.collection.messages
    prompt = str(messages[-1].get("content", "")) if messages else ""
    return SampleText(prompt, trajectory.text, card.reward or 0.0)


def _fields(report: UpdateReport, failures: list[str]) -> Mapping[str, Any]:
    """What the log has of a step besides its metrics."""
    adapter = report.adapter
    return {
        "optimizer_step": report.step,
        "status": report.status,
        "reason": report.reason,
        "adapter": adapter.name if adapter else None,
        "version": adapter.version if adapter else None,
        "checkpoint": report.checkpoint,
        "failures": failures,
    }


def _facts(config: Config, options: TrainOptions, served: Served) -> Mapping[str, str]:
    training, model = config.rl_training, config.model
    return {
        "model": f"{served.card.name}, {served.card.parameters / 1e6:,.0f}M parameters",
        "environment": options.environment,
        **({"reward": training.reward} if training.reward else {}),
        "adapter": f"{config.adapters.default_adapter}, rank {model.lora_rank}, alpha {model.lora_alpha:g}, "
        f"{', '.join(model.lora_target_modules)}",
        "update": f"{training.algorithm}, {options.prompts_per_step} prompts x {options.group_size} samples, "
        f"learning rate {training.optimizer.learning_rate:g}",
        **_evaluation_facts(config, len(served.training.held_out) if served.training else 0),
        "checkpoints": checkpoints_text(served.run),
        **({"log": str(metrics_file(served.run, options.log))} if served.run else {}),
    }


def _evaluation_facts(config: Config, tasks: int) -> Mapping[str, str]:
    evaluation = config.rl_training.evaluation
    if evaluation.every is None:
        return {}
    return {"evaluation": f"{tasks} held-out tasks x {evaluation.samples}, every {evaluation.every} updates"}
