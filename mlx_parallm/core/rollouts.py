"""The rollouts that a server draws by itself, as its status shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.core.levels import LevelCard


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """A snapshot of the rollouts that a server draws while it serves.

    Attributes:
        environment: its name in the configuration.
        state: drawing; waiting (the next update has enough trajectories); paused (as training or the engine is); or
            failed (nothing more is drawn).
        tasks_taken: tasks taken from the environment, those of earlier processes of the run included.
        groups_drawn: tasks answered since start. Some of their episodes may have failed.
        tasks_failed: tasks since start that could not be answered.
        last_failure: of a task, of an episode, or of the environment as a whole; for people, empty if there was none.
        levels: those of the curriculum, as far as they are known; empty without a curriculum.
    """

    environment: str
    state: str
    tasks_taken: int = 0
    groups_drawn: int = 0
    tasks_failed: int = 0
    last_failure: str = ""
    levels: tuple[LevelCard, ...] = ()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Tasks since start, by outcome."""
        return {"drawn": self.groups_drawn, "failed": self.tasks_failed}
