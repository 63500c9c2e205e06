"""AdapterNeeds: what the next update of one adapter waits for, as those who draw for it see it."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.updates.loop import TrainingLoop


class AdapterNeeds:
    """Event loop's thread only.

    Args:
        groups_in_scoring: the number of groups, of all adapters, whose scoring functions are at work.
    """

    def __init__(self, loop: TrainingLoop, buffer: TrajectoryBuffer, groups_in_scoring: Callable[[], int]) -> None:
        self._loop, self._buffer, self._groups_in_scoring = loop, buffer, groups_in_scoring

    @property
    def per_update(self) -> int:
        """Trajectories with a signal that make an update."""
        return self._loop.training.pace.trajectories

    @property
    def wants_groups(self) -> bool:
        """Whether the next update waits for more trajectories."""
        return not self._loop.has_enough

    @property
    def with_signal(self) -> int:
        """Trajectories that the next update can learn from."""
        return self._loop.with_signal

    @property
    def held(self) -> int:
        """Trajectories that no update has taken yet."""
        return self._buffer.waiting(self._loop.name)

    @property
    def groups_in_scoring(self) -> int:
        """Groups whose scoring functions are at work."""
        return self._groups_in_scoring()

    @property
    def pause_reason(self) -> str | None:
        """Why there are no automatic updates now; None: there are."""
        return self._loop.pause_reason

    @property
    def is_updating(self) -> bool:
        return self._loop.is_changing

    @property
    def live(self) -> AdapterRef:
        """The version that draws what is trained on."""
        return self._loop.training.live or BASE_ADAPTER
