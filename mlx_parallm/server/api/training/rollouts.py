"""The section `rollouts` of the training status."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from mlx_parallm.core import RolloutStatus
from mlx_parallm.server.api.fields import WireOutput


class LevelObject(WireOutput):
    """A level of the tasks."""

    level: str
    """Its name."""
    success: float
    """Mean reward of its recent tasks, from 0 to 1."""
    share: float
    """Probability that the next task is of this level."""
    drawn: int
    """Tasks of it since the curriculum began."""


class RolloutsObject(WireOutput):
    """Rollouts that the server draws by itself."""

    environment: str
    """The environment that the tasks come from."""
    state: Literal["drawing", "waiting", "paused", "failed"]
    """`drawing`; `waiting`: the next update has enough trajectories; `paused`, as training or the engine is; `failed`:
    nothing more is drawn."""
    tasks_taken: int
    """Tasks taken from the environment, those of earlier processes of the run included."""
    groups_drawn: int
    """Tasks answered since start."""
    tasks_failed: int
    """Tasks since start that could not be answered."""
    last_failure: str
    """The last failure of a task, an episode or the environment; empty if there was none."""

    levels: list[LevelObject]
    """Those of the curriculum, as far as they are known; empty without a curriculum."""

    @classmethod
    def of(cls, status: RolloutStatus) -> RolloutsObject:
        return cls(**asdict(status))
