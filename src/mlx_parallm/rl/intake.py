"""Intake: from a finished group to a complete one: the buffer, its scorers, and its clock."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from mlx_parallm.core import Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.groups import Drop, Group
from mlx_parallm.rl.parts import Scorers, ScoringError
from mlx_parallm.rl.reports import Emit

_log = logging.getLogger(__name__)


class Intake:
    """Event loop's thread only.

    Args:
        group_timeout_s: how long a group waits for its scorer.
        feedback_timeout_s: how long a group without a scorer waits for people; None: as long as the buffer keeps it.
        ready: told the trainee's name whenever a group of its may have become complete.
    """

    def __init__(
        self,
        buffer: TrajectoryBuffer,
        scorers: Scorers,
        group_timeout_s: float,
        feedback_timeout_s: float | None,
        ready: Callable[[str], None],
        emit: Emit,
    ) -> None:
        self._buffer = buffer
        self._scorers = scorers
        self._group_timeout_s = group_timeout_s
        self._feedback_timeout_s = feedback_timeout_s
        self._ready = ready
        self._emit = emit
        self._scoring: set[asyncio.Task[None]] = set()

    def add(self, trainee: str, trajectories: Sequence[Trajectory], refused: Drop | None) -> Drop | None:
        """Takes a new group in; `refused`: why it cannot be trained on. Returns why it was dropped at once, if so."""
        group = Group.of(trainee, trajectories)
        self._emit(
            "collected",
            adapter=trainee,
            group_id=group.group_id,
            version=str(group.adapter),
            trajectories=len(trajectories),
        )
        self._buffer.add(group)
        if self._buffer.holds(group) and refused is not None:
            self._buffer.drop(group, refused)
        if not self._buffer.holds(group):
            return group.members[0].reason
        timeout_s = self._feedback_timeout_s if group.scorer is None else self._group_timeout_s
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, trainee, group.group_id)
        if group.scorer is not None:
            task = asyncio.create_task(self._score(group, trajectories))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        return None

    def feedback(self, trajectory_id: str, score: float) -> None:
        """See `core.TrainingClient.feedback`. Raises InvalidRequestError: the score is no finite number."""
        if not math.isfinite(score):
            raise InvalidRequestError("The score must be a finite number.", param="score")
        group = self._buffer.feedback(trajectory_id, score)
        self._scored(group, trajectory_id=trajectory_id, score=score)

    async def close(self) -> None:
        """Scores nothing more."""
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)

    async def _score(self, group: Group, trajectories: Sequence[Trajectory]) -> None:
        try:
            rewards = await self._scorers.score(trajectories)
            if len(rewards) != len(trajectories) or not all(map(math.isfinite, rewards)):
                raise ScoringError(f"{len(trajectories)} trajectories got the rewards {rewards}")
        except Exception as error:  # noqa: BLE001 - whatever a scorer does costs its group only
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.fail(group)
            self._ready(group.trainee)
            return
        self._buffer.score(group, rewards)
        self._scored(group, rewards=list(rewards))

    def _scored(self, group: Group, **data: object) -> None:
        self._emit("scored", adapter=group.trainee, group_id=group.group_id, complete=group.complete, **data)
        if group.complete:
            self._ready(group.trainee)

    def _expire(self, trainee: str, group_id: str) -> None:
        """By id, so that a timer holds no group whose fate is known."""
        self._buffer.expire(group_id)
        self._ready(trainee)
