"""EnvironmentRun: the steps of `mlx_parallm_train` on the tasks of an environment, which the adapter answers."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

from mlx_parallm.app.environment_rollouts import EnvironmentRollouts
from mlx_parallm.app.step_rollouts import Batch, StepRollouts
from mlx_parallm.app.training_run import STEPS, TASKS, Filled, TrainingRun
from mlx_parallm.core import Signal
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.environments import Environment
from mlx_parallm.rl.rollouts.curriculum import figures
from mlx_parallm.rl.rollouts.warm_up import warm_up_batches
from mlx_parallm.rl.updates.selection import REFILLS

WARM_UP = "warm_up_updates"
"""Key of an update's progress: the updates of the warm-up so far."""

_UNSCORED = "a task's answers could not be scored"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EnvironmentRun(TrainingRun):
    """Each step draws groups of answers to some tasks of `source`, and waits for their rewards; see `StepRollouts`.
    Tasks that were answered for no update when the process ended are answered again.
    """

    source: Environment

    def __post_init__(self) -> None:
        super().__post_init__()
        window = max(self.options.prompts_per_step, _MIN_WINDOW)
        self.failures = deque[str](maxlen=window)  # "" for a task that succeeded
        options, config = self.options, self.config
        self.rollouts = EnvironmentRollouts(
            config,
            self.served,
            self.training,
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
        """Raises ConfigError: the engine cannot draw what training needs."""
        await self.rollouts.open(taken, self.service.progress())
        self.step_rollouts.open(taken)
        if done < self.options.steps:
            await self.rollouts.open_inference(self.cluster.engine if self.cluster is not None else None)

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
        made = int(self.service.progress().get(WARM_UP, 0))
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
        tokens, drawing, failures = 0, 0.0, list[str]()
        self.step_rollouts.begin_step(is_last)
        for _ in range(1 + self._refills):
            missing = self.options.prompts_per_step - len(self.step_rollouts.ready)
            if missing > 0:
                batch = await self._next_batch(missing)
                drawn = await self.step_rollouts.finish(batch)
                failed = [*drawn.failures, *[self._why_unscored] * self.step_rollouts.unscored(batch)]
                self._count(batch.end - batch.first, failed)
                for fault in drawn.faults:
                    self.view.task_failed(fault)
                failures += failed
                tokens, drawing = tokens + drawn.tokens, drawing + batch.seconds
        tasks = self.step_rollouts.end_step()
        state = self.rollouts.settle(tasks.stop)
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0}
        levels = figures(self.rollouts.levels)
        return Filled(speed, tuple(failures), levels, partial(self._is_of, tasks), tasks.stop, state)

    async def _next_batch(self, groups: int) -> Batch:
        batch = await self.step_rollouts.next_batch(groups)
        self.wanted += (batch.end - batch.first) * self.options.group_size
        self._report_rollout(batch.drawn)
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
        return f"{_UNSCORED}: {self.training.scorers.last_fault or 'it took too long'}"

    @property
    def _refills(self) -> int:
        """How many times groups without a learning signal are replaced: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self.config.rl_training.algorithm == "dapo" else 0
