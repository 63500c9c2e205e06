"""TrainingRun: the steps of `mlx_parallm_train`.

Each step draws groups of answers to some tasks, waits for their rewards, and makes one update.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.app.build import Served
from mlx_parallm.app.inference import build_inference
from mlx_parallm.app.train_progress import SampleText, TrainOptions, TrainView, run_facts
from mlx_parallm.app.training import TrainingRuntime, reward_of
from mlx_parallm.config import Config
from mlx_parallm.core import BASE_ADAPTER, Event, GenerationRequest, UpdateReport
from mlx_parallm.errors import ConfigError, EngineDeadError, InvalidRequestError, TrainingFailedError
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.environments import Environment, Task, read_system_prompt
from mlx_parallm.rl.held_out import without
from mlx_parallm.rl.inference.engine import InferenceEngine
from mlx_parallm.rl.rollouts import DrawResult, Rollouts, RolloutSettings
from mlx_parallm.rl.runs.listing import RUN_STEPS
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue
from mlx_parallm.rl.selection import REFILLS
from mlx_parallm.rl.tracking.tracking import Record, Tracking

FINAL = "final"
"""Tag of the checkpoint that a run ends with."""

STEPS, TASKS = RUN_STEPS, "run_tasks"
"""Keys of an update's progress: the steps made so far, and the tasks taken from the environment for them."""

_POLL_S = 0.05
_UNSCORED = "a task's answers could not be scored"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


@dataclass
class TrainingRun:
    """The steps of one run. `drawn` of `wanted` trajectories of the current step were reported to the view.

    `inference`: draws the samples; None until the first step.
    """

    config: Config
    options: TrainOptions
    source: Environment
    view: TrainView
    served: Served
    training: TrainingRuntime
    tracking: Tracking
    drawn: int = 0
    wanted: int = 0
    inference: InferenceEngine | None = None

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
            self.view.started(run_facts(self.config, options, self.served), done)
            if done < options.steps:
                await self._open_inference()
            if done < options.steps and (result := await self.service.evaluate_if_due()) is not None:
                self.view.evaluated(result)
                fields = {"adapter": result.adapter.name, "version": result.adapter.version}
                self.tracking.write(Record("evaluation", done, result.metrics, fields, result.at))
            for step in range(done + 1, options.steps + 1):
                await self._step(rollouts, step)
                self._check_failures()
        finally:
            try:
                if self.inference is not None:
                    await self.inference.close()
            finally:
                await self.training.close()

    async def _open_inference(self) -> None:
        """Raises ConfigError: the configured engine cannot draw what training needs."""
        self.inference = build_inference(self.config, self.served)
        await self.inference.open(self.service.status().current or BASE_ADAPTER)

    def _generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Draws from the inference engine, and collects what it draws."""
        assert self.inference is not None
        return self.served.collect(request, self.inference.generate(request))

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
        return Rollouts(self._generate, served.adapters, served.tokenizer, tasks, settings, self._report_rollout)

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
            self.view.sampled(SampleText.of(scored[-1][2]), SampleText.of(scored[0][2]))

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
