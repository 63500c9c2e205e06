"""RolloutDriver: samples groups for one adapter while the server serves, as many as its next update wants.

    tasks ─▶ RolloutDriver ─▶ engine (rows of rollouts) ─▶ trajectory buffer ─▶ AdapterRun

Rollouts share the rows of the batch with live requests by `server.priority_ratios`. The update is made by the training
loop, as for trajectories that clients send. While all groups of an update wait for their rewards or for tools, those of
the update after it are sampled, which are one version old when they are trained on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.rollouts.answers import NoTaskYetError, RolloutResult
from mlx_parallm.rl.status import RolloutState
from mlx_parallm.tasks import spawn

if TYPE_CHECKING:
    from mlx_parallm.rl.updates.run import AdapterRun

_POLL_S = 0.1
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 60.0
"""Wait after a task that failed; twice as long after each one more in a row."""

_log = logging.getLogger(__name__)


class GroupSource(Protocol):
    """Where the groups come from."""

    @property
    def quiet_s(self) -> float:
        """Seconds for which no rollout has asked the engine; 0 while it samples."""

    async def sample(self, groups: int) -> RolloutResult:
        """Answers the next tasks with the live version, and collects the answers."""


class RolloutDriver:
    """Samples groups until it is closed. Event loop's thread only.

    A task that fails costs itself, and one that does not come in time counts as failed and is waited for again; if
    that happens several times in a row, it waits longer and longer before the next one. If there are no more tasks,
    nothing more is sampled, and the server goes on.

    Attributes:
        state: drawing; waiting, as the next update has enough; paused; or failed, so that nothing more is sampled.
        sampled, failed: tasks that were answered, and tasks that could not be.
        last_failure: for people; empty if there was none.

    Args:
        loop: whose updates wait for the groups.
        groups_in_scoring: the number of groups, of all adapters, whose scoring functions are at work.
        group_size: answers to each task.
        rows: of the batch. As many groups are sampled at a time as fit in, so that rollouts never wait for each other
            in the engine's queue for long.
        is_paused: whether nothing should be sampled now.
    """

    def __init__(
        self,
        source: GroupSource,
        loop: AdapterRun,
        groups_in_scoring: Callable[[], int],
        config: RLTrainingConfig,
        group_size: int,
        rows: int,
        is_paused: Callable[[], bool],
    ) -> None:
        self.state: RolloutState = "waiting"
        self.sampled = self.failed = 0
        self.last_failure = ""
        self._source, self._loop, self._config = source, loop, config
        self._groups_in_scoring = groups_in_scoring
        self._group_size, self._most = group_size, max(1, rows // group_size)
        self._is_paused = is_paused
        self._sampling: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._samples_ahead, self._started_at = False, 0.0  # monotonic time when the last group was begun
        self._failed_in_a_row = 0

    def start(self) -> None:
        """Begins to sample."""
        self._running = spawn(self._run(), _log, "sampling rollouts")

    async def close(self) -> None:
        """Ends all rollouts. What was not finished is not collected. Safe to call before `start`, and twice."""
        tasks = [*self._sampling, *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Starts groups as long as the next update wants some. Returns when nothing more can be result."""
        try:
            await self._keep_sampling()
        except Exception as error:  # noqa: BLE001 - the status says what has ended it; the server serves without it
            _log.exception("sampling of rollouts has stopped")
            self._fail(str(error) or type(error).__name__)

    async def _keep_sampling(self) -> None:
        while self.state != "failed":
            self._samples_ahead = self._may_sample_ahead
            self.state = self._next_state()
            if self.state == "drawing" and self._wants_one_more:
                self._start_group()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(_POLL_S)

    def _next_state(self) -> RolloutState:
        if self._is_paused():
            return "paused"
        return "drawing" if self._sampling or self._wanted > 0 else "waiting"

    # -- how much --------------------------------------------------------------------------------

    @property
    def _wanted(self) -> int:
        """Members that are still wanted, without those that are being sampled or scored: for the next update and, while
        it waits, for the one after it."""
        loop = self._loop
        if loop.has_enough or (self._config.max_staleness == 0 and loop.is_changing):
            return 0
        updates = 2 if self._samples_ahead else 1
        return updates * loop.per_update - loop.with_signal - self._coming * self._group_size

    @property
    def _coming(self) -> int:
        """Groups that are being sampled or scored."""
        return len(self._sampling) + self._groups_in_scoring()

    @property
    def _may_sample_ahead(self) -> bool:
        """Whether groups for the update after the next one may be sampled: the groups of the next one wait for
        something else than the model, groups may be one version old, and the buffer has room for them."""
        config, loop = self._config, self._loop
        if config.draw_ahead_after_s is None or config.max_staleness == 0 or loop.is_changing or not self._coming:
            return False
        if self._samples_ahead:
            return True
        held = max(loop.waiting, loop.per_update)
        quiet = min(self._source.quiet_s, time.monotonic() - self._started_at)
        return self._wanted <= 0 and quiet >= config.draw_ahead_after_s and 2 * held <= config.trajectory_buffer_size

    @property
    def _wants_one_more(self) -> bool:
        """After a failure, one at a time is tried."""
        return self._wanted > 0 and len(self._sampling) < (1 if self._failed_in_a_row else self._most)

    # -- one group -------------------------------------------------------------------------------

    def _start_group(self) -> None:
        task, self._started_at = spawn(self._sample_group(), _log, "sampling a group"), time.monotonic()
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def _sample_group(self) -> None:
        """Samples one group. After a failure it waits, so that its place is not taken by the next one at once."""
        try:
            result = await self._source.sample(1)
        except NoTaskYetError as error:  # such as of a disk that stalls
            await self._count(RolloutResult(0, (str(error),)))
        except EngineDeadError:
            self._fail("the device thread has stopped")
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; the server goes on without it
            _log.exception("sampling of rollouts has stopped")
            self._fail(str(error) or type(error).__name__)
        else:
            await self._count(result)

    async def _count(self, result: RolloutResult) -> None:
        for failure in (*result.failures, *result.faults):
            self.last_failure = failure
            _log.warning("%s", failure)
        if not result.failures:
            self.sampled, self._failed_in_a_row = self.sampled + 1, 0
            return
        self.failed, self._failed_in_a_row = self.failed + 1, self._failed_in_a_row + 1
        await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** min(self._failed_in_a_row, 10), _LONGEST_DELAY_S))

    def _fail(self, reason: str) -> None:
        self.state, self.last_failure = "failed", reason
