"""Intake: how trajectories come into the buffer, and how they get their rewards."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core import Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.groups import DropReason, TrajectoryGroup
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService

_log = logging.getLogger(__name__)


class Intake:
    """Adds groups to the buffer and gets their rewards, from scorers and feedback. Event loop's thread only.

    Args:
        on_ready: called with an adapter's name whenever one of its groups may have become complete.
    """

    def __init__(
        self,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        config: RLTrainingConfig,
        on_ready: Callable[[str], None],
        emit: Emit,
    ) -> None:
        self._buffer, self._scorers, self._config = buffer, scorers, config
        self._on_ready, self._emit = on_ready, emit
        self._scoring: set[asyncio.Task[None]] = set()

    def add(self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None) -> DropReason | None:
        """Adds the group of one prompt. `refused`: why it cannot be trained on; None if it can.

        Returns:
            Why the group was dropped at once; None if it was not.
        """
        group = TrajectoryGroup(adapter, trajectories)
        self._emit(
            "collected",
            adapter=adapter,
            group_id=group.group_id,
            version=str(group.version),
            trajectories=len(trajectories),
        )
        self._buffer.add(group)
        if refused is not None:
            self._buffer.drop(group, refused)
        if not self._buffer.holds(group):
            return group.members[0].reason
        timeout_s = self._config.feedback_timeout_s if group.scorer is None else self._config.group_timeout_s
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, adapter, group.group_id)
        if group.scorer is not None:
            task = asyncio.create_task(self._score(group, trajectories))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        return None

    def feedback(self, trajectory_id: str, score: float) -> None:
        """See `core.TrainingClient.feedback`. Raises InvalidRequestError if the score is not a finite number."""
        if not math.isfinite(score):
            raise InvalidRequestError("The score must be a finite number.", param="score")
        group = self._buffer.feedback(trajectory_id, score)
        of_group = {"adapter": group.adapter, "group_id": group.group_id, "complete": group.complete}
        self._emit("scored", **of_group, trajectory_id=trajectory_id, score=score)
        self._on_ready(group.adapter)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)

    async def _score(self, group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> None:
        try:
            rewards = await self._scorers.score(trajectories)
        except Exception as error:  # noqa: BLE001 - a failing scorer must affect only its own group
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)
        else:
            self._buffer.score(group, rewards)
            of_group = {"adapter": group.adapter, "group_id": group.group_id, "complete": group.complete}
            self._emit("scored", **of_group, rewards=list(rewards))
        self._on_ready(group.adapter)

    def _expire(self, adapter: str, group_id: str) -> None:
        """Drops the members that still have no reward. The argument is an id and not a group, so that the timer does
        not keep an ended group in memory."""
        self._buffer.expire(group_id)
        self._on_ready(adapter)
