"""ScoringService: rewards from scoring processes, whatever scorers do there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.core import Collection, Trajectory
from mlx_parallm.rl.parts import ScoringError
from mlx_parallm.rl.scoring.checks import Checks
from mlx_parallm.rl.scoring.pool import CLOSED, Job, Pool
from mlx_parallm.rl.scoring.sample import Sample


class ScoringService:
    """Implements `rl.parts.Scorers`. On one event loop. A group that cannot be scored costs itself only.

    Args:
        processes: that score, at most. What requests bring is checked in another one.
        batch_size: trajectories sent to a process at a time, at most; a larger group is sent alone, whole.
        timeout_s: how long a group may take, not counting the import of its scorer.
    """

    def __init__(self, processes: int, batch_size: int, timeout_s: float) -> None:
        self._pool = Pool(processes, batch_size, timeout_s)
        self._checks = Checks()
        self._closed = False

    async def check(self, collection: Collection) -> None:
        """See `Checks.check`."""
        await self._checks.check(collection)

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """Rewards of trajectories that have one scorer, in order. Raises ScoringError."""
        if not group:
            return ()
        collection = group[0].collection
        if collection.scorer is None or self._closed:
            raise ScoringError(CLOSED if self._closed else "the group names no scorer")
        try:
            reply = await self._pool.run(_job(collection.scorer, group))
        except ScoringError as error:
            raise ScoringError(f"{collection.scorer}: {error}") from error
        return tuple(map(float, reply["rewards"]))

    async def close(self) -> None:
        """Ends the processes; groups that wait fail."""
        self._closed = True
        await asyncio.gather(self._pool.close(), self._checks.close())


def _job(scorer: str, group: Sequence[Trajectory]) -> Job:
    message = {"scorer": scorer, "samples": [Sample.of(trajectory).to_json() for trajectory in group]}

    def valid(reply: Mapping[str, Any]) -> bool:
        rewards = reply.get("rewards")
        return isinstance(rewards, list) and len(rewards) == len(group) and all(map(_finite, rewards))

    collection = group[0].collection
    return Job(collection.client, _rule(scorer, collection.metadata), len(group), message, valid)


def _rule(scorer: str, metadata: Mapping[str, Any]) -> str:
    """The scorer, and a digest of what it reads."""
    text = json.dumps(dict(metadata), sort_keys=True, default=str)
    return f"{scorer} {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _finite(reward: object) -> bool:
    return isinstance(reward, float | int) and math.isfinite(reward)
