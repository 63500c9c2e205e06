"""ServerRollouts: a server that trains samples rollouts of its environment by itself, while it serves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from mlx_parallm.config import Config
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.rl.configured_reward import check_scorable
from mlx_parallm.rl.environments import Environment, environment
from mlx_parallm.rl.rollouts.answers import InferenceEngine, group_prefixes, task_number
from mlx_parallm.rl.rollouts.driver import RolloutDriver
from mlx_parallm.rl.rollouts.environment import EnvironmentRollouts
from mlx_parallm.rl.runs.record import RUN_TASKS
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.status import RolloutStatus

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

_GROUPS_LOOKED_AT = 1000
"""The newest groups of the journal. One of them has the highest task number of earlier processes."""


def environment_of(config: Config) -> Environment | None:
    """The environment that a server samples rollouts of; None if it samples none. Importing it may take seconds.

    Raises:
        ConfigError: it is unknown, or cannot be loaded, or its tasks cannot be scored.
    """
    training = config.rl_training
    name = training.own_environment
    if not training.enabled or not training.server_rollouts or name is None:
        return None
    source = environment(name, training.reward is not None)
    check_scorable(config, source)
    return source


class ServerRollouts:
    """Samples groups for the default adapter until it is closed. Event loop's thread only. Training must have started.

    `engine`: of this server. `run`: the id of the run.
    """

    def __init__(
        self,
        config: Config,
        service: TrainingService,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        run: str,
        source: Environment,
    ) -> None:
        self._config, self._service, self._run = config.rl_training, service, run
        size, rows = self._config.rollout_group_size, config.server.max_batch_size
        loop = self._service.loop()

        def is_paused() -> bool:
            return service.is_asleep() or loop.pause_reason is not None or engine.stats().paused

        def in_scoring() -> int:
            return self._service.trajectories.groups.in_scoring

        self._rollouts = EnvironmentRollouts(config, service, tokenizer, run, source, size)
        self._driver = RolloutDriver(self._rollouts, loop, in_scoring, self._config, size, rows, is_paused)

    async def open(self, inference: InferenceEngine) -> None:
        """Gets ready. Tasks that were answered in an earlier process of the run are not answered again. A curriculum
        goes on from the last update.

        Raises:
            ConfigError: the engine cannot sample what training needs.
        """
        progress = self._service.loop().training.progress
        taken = max(await self._taken_before(), int(progress.get(RUN_TASKS, 0)))
        await self._rollouts.open(taken, progress)
        await self._rollouts.open_inference(inference)

    def start(self) -> None:
        """Begins to sample. Call it after `open`."""
        self._driver.start()

    async def close(self) -> None:
        """Ends all rollouts. What was not finished is not collected. Safe to call before `open`."""
        await self._driver.close()
        await self._rollouts.close()

    def status(self) -> RolloutStatus:
        driver = self._driver
        return RolloutStatus(
            environment=self._config.environment or "",
            state=driver.state,
            tasks_taken=self._rollouts.taken,
            groups_drawn=driver.sampled,
            tasks_failed=driver.failed,
            last_failure=driver.last_failure,
            levels=self._rollouts.levels,
        )

    def progress(self) -> Mapping[str, float] | None:
        """What `open` needs in another process, to be noted with an update. None: it needs nothing."""
        state = self._rollouts.settle()
        return {RUN_TASKS: self._rollouts.settled_tasks, **state} if state else None

    async def _taken_before(self) -> int:
        """The number of the first task that no earlier process of the run has answered, or one after it."""
        run, journal = self._run, self._service.parts.journal
        found = [
            await journal.read(partial(JournalFile.newest_groups, prefix=prefix, count=_GROUPS_LOOKED_AT)) or ()
            for prefix in group_prefixes(run)
        ]
        return max((task_number(group_id, run) + 1 for groups in found for group_id in groups), default=0)
