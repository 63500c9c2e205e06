"""GroupScoring: asks the scoring functions of complete groups for their rewards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.group_rewards import GroupRewards
from mlx_parallm.rl.collect.groups import DropReason, TrajectoryGroup
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Score
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.tasks import spawn

_log = logging.getLogger(__name__)


class GroupScoring:
    """Event loop's thread only. Its length is the number of groups that are being scored.

    Args:
        journal: gets the rewards.
        on_ready: called with a group that has its rewards, or was dropped without.
    """

    def __init__(
        self,
        rewards: GroupRewards,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        journal: Journal,
        on_ready: Callable[[TrajectoryGroup], None],
        emit: Emit,
    ) -> None:
        self._rewards, self._buffer, self._scorers = rewards, buffer, scorers
        self._journal, self._on_ready, self._emit = journal, on_ready, emit
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, group: TrajectoryGroup) -> None:
        """Begins to score a group to which no more members come."""
        task = spawn(self._score(group), _log, f"scoring {group.group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _score(self, group: TrajectoryGroup) -> None:
        if not group.waiting:  # after a restart, the journal had the rewards
            return
        try:
            rewards = await self._scorers.score([member.trajectory for member in group.members])
        except Exception as error:  # noqa: BLE001 - a failing scorer must affect only its own group
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)
        else:
            for member, reward in zip(group.members, rewards, strict=True):
                self._journal.noted(group.adapter, group.group_id, Score(member.trajectory.trajectory_id, reward))
            self._rewards.score(group, rewards)
            of_group = {**group.event_data, "complete": group.complete}
            self._emit("scored", **of_group, rewards=list(rewards))
        self._on_ready(group)
