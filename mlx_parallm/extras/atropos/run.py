"""AtroposRun: the steps of `mlx_parallm_train` on groups of Atropos' environments, which come through its API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from mlx_parallm.app.training_run import Filled, TrainingRun
from mlx_parallm.extras.atropos.registration import open_source, registration
from mlx_parallm.extras.atropos.source import AtroposSource

_POLL_S = 0.5


@dataclass(kw_only=True)
class AtroposRun(TrainingRun):
    """Each step takes batches until an update's trajectories wait. What was taken and not trained on when the process
    ended is trained on first."""

    restores: ClassVar[bool] = True

    source: AtroposSource | None = field(default=None, init=False)

    async def _open(self, done: int, taken: int) -> None:
        registered = registration(self.config, self.served, done, self.options.steps)
        self.source = open_source(self.config, self.served, self.service, registered)

    async def _close(self) -> None:
        if self.source is not None:
            await self.source.close()

    async def _fill(self, is_last: bool) -> Filled:
        assert self.source is not None  # `_open` was called
        self.wanted, refused = self.config.rl_training.update_frequency, self.source.refused
        self._report_rollout(0)
        loop = self.service.loop()
        while not loop.has_enough:
            self._check_alive()
            if not await self.source.take():
                await asyncio.sleep(_POLL_S)
            self._report_rollout(min(loop.with_signal, self.wanted) - self.sampled)
        return Filled(failures=("a group from Atropos could not be used",) * (self.source.refused - refused))
