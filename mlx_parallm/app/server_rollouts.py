"""ServerRollouts: a server that trains draws rollouts of its environment by itself, while it serves.

    environment ─▶ EnvironmentRollouts ─▶ engine (rows of rollouts) ─▶ trajectory buffer ─▶ TrainingLoop

Rollouts share the rows of the batch with live requests by `server.priority_ratios`. So many are drawn as the next
update wants; it is made by the training loop, as for trajectories that clients send. While all of them wait for their
rewards or for tools, those of the update after it are drawn, which are one version old when they are trained on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from mlx_parallm.app.build import Served
from mlx_parallm.app.environment_rollouts import EnvironmentRollouts
from mlx_parallm.app.training import TrainingRuntime
from mlx_parallm.config import Config
from mlx_parallm.core import RolloutStatus
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.environments import Environment, environment
from mlx_parallm.rl.rollouts.answers import DrawResult, group_prefixes, task_number
from mlx_parallm.rl.rollouts.curriculum import TAKEN
from mlx_parallm.rl.runs.listing import RUN_TASKS

_POLL_S = 0.1
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 60.0
"""Wait after a task that failed; twice as long after each one more in a row."""

_GROUPS_LOOKED_AT = 1000
"""The newest groups of the journal. One of them has the highest task number of earlier processes."""

_log = logging.getLogger(__name__)


def environment_of(config: Config) -> Environment | None:
    """The environment that a server draws rollouts of; None if it draws none. Importing it may take seconds.

    Raises:
        ConfigError: it is unknown, or cannot be loaded.
    """
    training = config.rl_training
    name = training.own_environment
    if not training.enabled or not training.server_rollouts or name is None:
        return None
    return environment(name, training.reward is not None)


class ServerRollouts:
    """Draws groups for the default adapter until it is closed. Event loop's thread only.

    A task that fails costs itself; if several in a row fail, it waits longer and longer before the next one. If the
    environment has no more tasks, nothing more is drawn, and the server goes on.

    Attributes:
        held_back: whether the server wants no rollouts now, because it sleeps.
    """

    def __init__(self, config: Config, served: Served, training: TrainingRuntime, source: Environment) -> None:
        self.held_back: Callable[[], bool] = lambda: False
        self._config, self._served = config.rl_training, served
        self._service = training.service
        self._group_size = self._config.rollout_group_size
        self._rollouts = EnvironmentRollouts(config, served, training, source, self._group_size)
        # As many groups as there are rows, so that rollouts never wait for each other in the engine's queue for long.
        self._most = max(1, config.server.max_batch_size // self._group_size)
        self._drawing: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._state = "waiting"
        self._draws_ahead, self._started_at = False, 0.0  # monotonic time when the last group was begun
        self._drawn = self._failed = self._failed_in_a_row = 0
        self._last_failure = ""

    async def open(self) -> None:
        """Gets ready. Tasks that were answered in an earlier process of the run are not answered again. A curriculum
        goes on from the last update.

        Raises:
            ConfigError: the tasks cannot be scored, or the engine cannot draw what training needs.
        """
        progress = self._service.progress()
        taken = max(await self._taken_before(), int(progress.get(RUN_TASKS, 0)))
        await self._rollouts.open(taken, progress)
        await self._rollouts.open_inference()

    def start(self) -> None:
        """Begins to draw. Call it after `open`."""
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends all rollouts. What was not finished is not collected. Safe to call before `open`."""
        tasks = [*self._drawing, *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._rollouts.close()

    def status(self) -> RolloutStatus:
        return RolloutStatus(
            environment=self._config.environment or "",
            state=self._state,
            tasks_taken=self._rollouts.taken,
            groups_drawn=self._drawn,
            tasks_failed=self._failed,
            last_failure=self._last_failure,
            levels=self._rollouts.levels,
        )

    def progress(self) -> Mapping[str, float] | None:
        """What `open` needs in another process, to be noted with an update. None: it needs nothing."""
        state = self._rollouts.settle()
        return {RUN_TASKS: state[TAKEN], **state} if state else None

    async def _taken_before(self) -> int:
        """The number of the first task that no earlier process of the run has answered, or one after it."""
        assert self._served.run is not None  # a server that trains keeps checkpoints
        run = self._served.run.id
        found = [await self._service.newest_groups(prefix, _GROUPS_LOOKED_AT) for prefix in group_prefixes(run)]
        return max((task_number(group_id, run) + 1 for groups in found for group_id in groups), default=0)

    # -- drawing ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Starts groups as long as the next update wants some. Returns when nothing more can be drawn."""
        while self._state != "failed":
            self._draws_ahead = self._may_draw_ahead
            self._state = self._next_state()
            if self._state == "drawing" and self._wants_one_more:
                self._start_group()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(_POLL_S)

    def _next_state(self) -> str:
        if self._is_paused:
            return "paused"
        return "drawing" if self._drawing or self._wanted > 0 else "waiting"

    @property
    def _is_paused(self) -> bool:
        return self.held_back() or self._service.is_paused or self._served.engine.stats().paused

    @property
    def _wanted(self) -> int:
        """Members that are still wanted, without those that are being drawn or scored: for the next update and, while
        it waits, for the one after it."""
        service, config = self._service, self._config
        if not service.wants_groups or (config.max_staleness == 0 and self._is_updating):
            return 0
        updates = 2 if self._draws_ahead else 1
        return updates * config.update_frequency - service.waiting_with_signal - self._coming * self._group_size

    @property
    def _coming(self) -> int:
        """Groups that are being drawn or scored."""
        return len(self._drawing) + self._service.groups_in_scoring

    @property
    def _is_updating(self) -> bool:
        return self._service.status().state == "updating"

    @property
    def _may_draw_ahead(self) -> bool:
        """Whether groups for the update after the next one may be drawn: the groups of the next one wait for something
        else than the model, groups may be one version old, and the buffer has room for them."""
        config, held = self._config, max(self._service.trajectories_held, self._config.update_frequency)
        if config.draw_ahead_after_s is None or config.max_staleness == 0 or self._is_updating or not self._coming:
            return False
        if self._draws_ahead:
            return True
        quiet = min(self._rollouts.quiet_s, time.monotonic() - self._started_at)
        return self._wanted <= 0 and quiet >= config.draw_ahead_after_s and 2 * held <= config.trajectory_buffer_size

    @property
    def _wants_one_more(self) -> bool:
        """After a failure, one at a time is tried."""
        return self._wanted > 0 and len(self._drawing) < (1 if self._failed_in_a_row else self._most)

    def _start_group(self) -> None:
        task, self._started_at = asyncio.create_task(self._draw_group()), time.monotonic()
        self._drawing.add(task)
        task.add_done_callback(self._drawing.discard)

    async def _draw_group(self) -> None:
        """Draws one group. After a failure it waits, so that its place is not taken by the next one at once."""
        try:
            drawn = await self._rollouts.draw(1)
        except EngineDeadError:
            self._fail("the device thread has stopped")
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; the server goes on without it
            _log.error("no more rollouts are drawn: %s", error)
            self._fail(str(error) or type(error).__name__)
        else:
            await self._count(drawn)

    async def _count(self, drawn: DrawResult) -> None:
        for failure in (*drawn.failures, *drawn.faults):
            self._last_failure = failure
            _log.warning("%s", failure)
        if not drawn.failures:
            self._drawn, self._failed_in_a_row = self._drawn + 1, 0
            return
        self._failed, self._failed_in_a_row = self._failed + 1, self._failed_in_a_row + 1
        await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** min(self._failed_in_a_row, 10), _LONGEST_DELAY_S))

    def _fail(self, reason: str) -> None:
        self._state, self._last_failure = "failed", reason
