"""EnvironmentRun: the steps of `mlx_parallm_train` on the tasks of an environment, which the adapter answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.app.environment_rollouts import EnvironmentRollouts
from mlx_parallm.app.training_run import STEPS, TASKS, Filled, TrainingRun
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.curriculum import figures
from mlx_parallm.rl.environments import Environment
from mlx_parallm.rl.rollouts import DrawResult
from mlx_parallm.rl.selection import REFILLS
from mlx_parallm.rl.warm_up import warm_up_batches

WARM_UP = "warm_up_updates"
"""Key of an update's progress: the updates of the warm-up so far."""

_POLL_S = 0.05
_UNSCORED = "a task's answers could not be scored"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EnvironmentRun(TrainingRun):
    """Each step draws groups of answers to some tasks of `source`, and waits for their rewards. Tasks that were
    answered for no update when the process ended are answered again.
    """

    source: Environment

    def __post_init__(self) -> None:
        super().__post_init__()
        window = max(self.options.prompts_per_step, _MIN_WINDOW)
        self.failures = deque[str](maxlen=window)  # "" for a task that succeeded
        self.rollouts = EnvironmentRollouts(
            self.config, self.served, self.training, self.source, self.options.group_size, self._report_rollout
        )

    async def _open(self, done: int, taken: int) -> None:
        """Raises ConfigError: the tasks cannot be scored, or the engine cannot draw what training needs."""
        await self.rollouts.open(taken, self.service.progress())
        if done < self.options.steps:
            await self.rollouts.open_inference()

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
            report = await self.service.update(given=batch, progress={STEPS: 0, TASKS: 0, WARM_UP: number})
            if report.status != "published":
                raise TrainingFailedError(f"update {number} of the warm-up was {report.status}: {report.reason}")
            _log.info("update %d of %d of the warm-up is made", number, len(batches))

    async def _close(self) -> None:
        await self.rollouts.close()

    @property
    def _taken(self) -> int:
        return self.rollouts.taken

    @property
    def _state(self) -> Mapping[str, float]:
        return self.rollouts.settle()

    async def _fill(self) -> Filled:
        tokens, drawing, failures = 0, 0.0, list[str]()
        for _ in range(1 + self._refills):
            if missing := self.options.prompts_per_step - self.service.status().groups_ready:
                began, unscored = time.monotonic(), self._unscored()
                drawn = await self._draw(missing)
                drawing += time.monotonic() - began
                await self._wait_for_rewards()
                failed = [*drawn.failures, *[self._why_unscored] * (self._unscored() - unscored)]
                self._count(missing, failed)
                for fault in drawn.faults:
                    self.view.task_failed(fault)
                failures += failed
                tokens += drawn.tokens
        self.rollouts.settle()
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0}
        return Filled(speed, tuple(failures), figures(self.rollouts.levels))

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

    async def _draw(self, groups: int) -> DrawResult:
        """Draws groups from the live version."""
        self.wanted += groups * self.options.group_size
        self._report_rollout(0)
        return await self.rollouts.draw(groups)

    async def _wait_for_rewards(self) -> None:
        """Returns when every trajectory has its reward. Raises EngineDeadError: the device thread has stopped."""
        while self.service.status().trajectories_waiting:
            self._check_alive()
            await asyncio.sleep(_POLL_S)
