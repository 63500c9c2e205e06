"""DivergenceResponse: pauses training, or rolls it back, when something has diverged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.config import Action
from mlx_parallm.core import Divergence, UpdateReport
from mlx_parallm.rl.divergence.pausing import Pausing
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.recovery import PolicyJournal
from mlx_parallm.rl.updates.selection import GroupSelection


class DivergenceResponse:
    """Responds to the divergences of one adapter. The lock of `TrainingLoop` orders the calls."""

    def __init__(
        self, training: AdapterTraining, changes: PolicyJournal, selection: GroupSelection, pausing: Pausing
    ) -> None:
        self._training = training
        self._changes = changes
        self._selection = selection
        self._pausing = pausing

    async def to_rewards(self) -> UpdateReport | None:
        """Reports a collapse of the rewards, and responds to it.

        Returns:
            The report of the update that is not made because of it; None: the update is to be made.
        """
        training = self._training
        fall = training.watch.judge_rewards(training.rewards.trend)
        if fall is None:
            return None
        training.watch.tell([fall], training.rewards.trend, training.live, training.reports.step)
        if fall.action == Action.TELL:
            return None
        await self.to([fall])
        rolled_back = fall.action == Action.ROLL_BACK
        reason = f"{fall.reason}: {training.live} is live again" if rolled_back else fall.reason
        report = training.reports.skipped(training.live, "rolled_back" if rolled_back else "diverged", reason)
        return replace(report, divergences=(fall,))

    async def to(self, found: Sequence[Divergence]) -> None:
        """Pauses or rolls back for divergences that were reported and whose update was held."""
        reasons = {each.action: each.reason for each in found}
        if Action.ROLL_BACK in reasons:
            await self._training.roll_back(None)
            await self._pausing.recorded(self._changes.rolled_back())
            self._selection.restart()
        if Action.PAUSE in reasons:
            self._pausing.pause(reasons[Action.PAUSE])
