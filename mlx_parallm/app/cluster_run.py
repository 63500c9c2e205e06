"""The steps of `mlx_parallm_train` in a cluster. ClusterRun: those on what clients have sent to be collected."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import ClassVar

from mlx_parallm.app.cluster import joined_trainer
from mlx_parallm.app.cluster_intake import ClusterIntake
from mlx_parallm.app.cluster_training import ClusterTraining
from mlx_parallm.app.training_run import Filled, TrainingRun
from mlx_parallm.config import Config
from mlx_parallm.errors import ConflictError, TrainingFailedError

_POLL_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ClusterRun(TrainingRun):
    """Each step waits until enough trajectories have come. What came and was not trained on when the process ended is
    trained on first."""

    restores: ClassVar[bool] = True

    reading: asyncio.Task[None] | None = field(default=None, init=False)
    intake: ClusterIntake | None = field(default=None, init=False)

    async def _open(self, done: int, taken: int) -> None:
        assert self.cluster is not None  # only a trainer of a cluster makes this run
        self.intake = ClusterIntake(self.service)
        self.reading = asyncio.create_task(self.intake.run(self.cluster.node.deliveries()))

    async def _close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait([self.reading])

    async def _ended(self) -> None:
        if self.intake is not None:
            await self.intake.acknowledge()

    async def _fill(self, is_last: bool) -> Filled:
        self.wanted = self.config.rl_training.update_frequency
        self._report_rollout(0)
        warned = False
        while self.service.wants_groups:
            self._check_alive()
            assert self.reading is not None  # `_open` was called
            if self.reading.done():
                self.reading.result()  # raises what has ended it
            await asyncio.sleep(_POLL_S)
            self._report_rollout(min(self.service.waiting_with_signal, self.wanted) - self.drawn)
            if not warned and (alike := self.service.dropped_without_signal) >= self.wanted:
                warned = True
                _log.warning(
                    "%d answers were dropped, because all answers of their group have the same reward; an update waits "
                    "for %d answers in groups whose rewards differ",
                    alike,
                    self.wanted,
                )
        return Filled()


async def run_in_cluster(config: Config, steps: TrainingRun) -> None:
    """Makes the steps of a run as the trainer of its adapter in the cluster.

    Raises:
        ConfigError: the head does not answer, or refuses this node.
        TrainingFailedError: another process trains the adapter.
        Exception: what the run raises.
    """
    address, token = config.cluster.connect_to, config.cluster.token
    assert address is not None
    assert token is not None  # `prepare_trainer` has asked for it
    try:
        async with joined_trainer(config, steps.served) as node:
            url, secret = f"http://{address}", token.get_secret_value()
            steps.cluster = ClusterTraining(node, steps.served, steps.training, url, secret)
            await steps.run()
    except BaseExceptionGroup as group:  # of the tasks beside the run; the first error has ended the others
        raise _as_failure(_first(group)) from group
    except ConflictError as error:
        raise _as_failure(error) from error


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _as_failure(error: BaseException) -> BaseException:
    return TrainingFailedError(str(error)) if isinstance(error, ConflictError) else error
